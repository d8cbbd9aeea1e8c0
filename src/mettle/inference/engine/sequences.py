"""A request under way: the sequences of its choices, when each of them ends, and what its listener is told.

No torch here. Invariant: a sequence gets no token after it has ended, and its lists grow together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mettle.errors import MettleError
from mettle.inference.engine.grammars import TokenConstraint
from mettle.inference.engine.protocol import (
    Choice,
    FinishReason,
    Generation,
    GenerationRequest,
    RedrawnToken,
    TokenEvent,
    TokenListener,
    TokenLogprob,
)
from mettle.inference.engine.served_adapters import ChosenAdapter

DecodeText = Callable[[Sequence[int]], str]
"""Ids to the text in which stop strings are looked for."""

_MAX_TOKENS_PER_CHARACTER = 4


class RunningRequest:
    """One request: `num_open` of its choices have not ended yet. `arrival` counts requests in their order.

    `adapter` is the one that samples; None is the base.
    """

    def __init__(
        self,
        request: GenerationRequest,
        listener: TokenListener,
        arrival: int = 0,
        adapter: ChosenAdapter[Any] | None = None,
    ) -> None:
        self.request = request
        self.adapter = adapter
        self.arrival = arrival
        self.is_counted = False  # its prompt, in the totals
        self.listener = listener
        self.prompt_logprobs: list[float | None] | None = None
        self.prompt_top_logprobs: list[list[TokenLogprob]] | None = None
        self.redrawn: list[RedrawnToken] | None = None
        self.choices = tuple(Choice(i) for i in range(request.n))
        self.num_open = request.n
        self.is_settled = False

    def unit(self, base_version: int) -> tuple[str, int]:
        """The adapter and the version that sample now, where the base is of `base_version`."""
        return ("", base_version) if self.adapter is None else self.adapter.unit

    @property
    def is_scoring(self) -> bool:
        """True when the request wants log-probabilities of its prompt and no tokens."""
        return self.request.params.max_tokens == 0

    def end_choice(self, choice: Choice, reason: FinishReason, stop: str | None = None) -> None:
        """Mark a choice as ended; with the last one the request is ready for `finish`."""
        choice.finish_reason, choice.stop = reason, stop
        self.num_open -= 1

    def finish(self) -> None:
        """Tell the listener what came of it."""
        if not self.is_settled:
            self.is_settled = True
            request = self.request
            self.listener.on_finish(
                Generation(
                    request.request_id,
                    len(request.prompt_ids),
                    self.choices,
                    self.prompt_logprobs,
                    self.prompt_top_logprobs,
                    self.redrawn,
                )
            )

    def fail(self, error: MettleError) -> None:
        """Tell the listener that the engine failed."""
        if not self.is_settled:
            self.is_settled = True
            self.listener.on_failure(error)

    def abort(self) -> None:
        """End what has not ended, and tell."""
        self.end_rest()
        self.finish()

    def end_rest(self) -> None:
        """Mark what has not ended as aborted; the request is ready for `finish`."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self.end_choice(choice, "abort")
                if self.request.has_token_events:
                    self.listener.on_token(TokenEvent(choice.index, None, 0.0, -1, [], "abort", None))


def ends_of(
    request: GenerationRequest, max_model_len: int, eos_token_ids: frozenset[int]
) -> tuple[int, frozenset[int]]:
    """How many tokens a choice of a request may have, and which of them end it."""
    params = request.params
    room = max_model_len - len(request.prompt_ids)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    return max_tokens, frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)


class CountedListener:
    """A listener that also counts its request out of the queue, before it tells of the end."""

    __slots__ = ("_count_out", "_listener", "on_token")

    def __init__(self, listener: TokenListener, count_out: Callable[[], None]) -> None:
        self._listener = listener
        self._count_out = count_out
        self.on_token: Callable[[TokenEvent], None] = listener.on_token

    def on_finish(self, generation: Generation) -> None:
        """See TokenListener."""
        self._count_out()
        self._listener.on_finish(generation)

    def on_failure(self, error: MettleError) -> None:
        """See TokenListener."""
        self._count_out()
        self._listener.on_failure(error)


class RunningSequence:
    """One choice that is being sampled. `length` counts its tokens, the newest of which is not in the KV cache yet.

    A choice that lost its keys and values goes through its tokens again (`replay`, `step_on`): its `length` then lags
    behind, and what it has is kept, the state of its noise with it.
    """

    __slots__ = (
        "_decode",
        "_max_tokens",
        "_noise",
        "_stop_window",
        "choice",
        "constraint",
        "is_pure",
        "is_replaying",
        "kin",
        "length",
        "num_top_logprobs",
        "owner",
        "params",
        "stop_token_ids",
    )

    def __init__(
        self,
        owner: RunningRequest,
        choice: Choice,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        noise: np.random.Generator | None,
        decode: DecodeText | None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        self.owner, self.choice, self._noise = owner, choice, noise
        self.constraint = constraint
        self.params = owner.request.params
        self.num_top_logprobs = owner.request.top_logprobs
        self.stop_token_ids = stop_token_ids
        self.length = len(owner.request.prompt_ids)
        self.is_replaying = False
        self.is_pure = False  # its prompt was computed with the weights of one version
        self.kin = 0  # of sequences that run, equal where all that was computed of them is
        self._max_tokens = max_tokens
        self._decode = decode if self.params.stop else None
        longest = max((len(s) for s in self.params.stop), default=0)
        self._stop_window = (longest + 1) * _MAX_TOKENS_PER_CHARACTER

    @property
    def has_ended(self) -> bool:
        """True when no more tokens are wanted."""
        return self.choice.finish_reason is not None

    @property
    def has_failed(self) -> bool:
        """True when it was not ended by what it sampled."""
        return self.choice.finish_reason == "abort"

    @property
    def noise(self) -> np.random.Generator | None:
        """What a choice with a seed draws from; not while it goes through tokens that it has drawn."""
        return None if self.is_replaying else self._noise

    @property
    def age(self) -> tuple[int, int]:
        """Less for what came earlier."""
        return self.owner.arrival, self.choice.index

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt's tokens."""
        return self.owner.request.prompt_ids

    @property
    def sampled_ids(self) -> Sequence[int]:
        """The choice's tokens."""
        return self.choice.token_ids

    @property
    def num_tokens(self) -> int:
        """All tokens of the prompt and the choice, whether their keys and values are there or not."""
        return len(self.owner.request.prompt_ids) + len(self.choice.token_ids)

    @property
    def newest(self) -> int:
        """The token at `length`, which comes into the cache with the next step."""
        return self.choice.token_ids[self.length - 1 - len(self.owner.request.prompt_ids)]

    def replay(self) -> None:
        """Begin anew after the prompt; what was sampled is not sampled again."""
        self.length = len(self.owner.request.prompt_ids)
        self.is_replaying = bool(self.choice.token_ids)

    def step_on(self) -> None:
        """Go on to the next token that was sampled before."""
        self.length += 1
        self.is_replaying = self.length < self.num_tokens

    def add(self, token_id: int, logprob: float, version: int, top: list[TokenLogprob] | None) -> None:
        """Take a sampled token, decide whether it was the last, and tell a listener that hears tokens."""
        choice = self.choice
        choice.token_ids.append(token_id)
        choice.logprobs.append(logprob)
        choice.versions.append(version)
        self.length += 1
        if top is not None:
            choice.top_logprobs.append(top)
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if token_id in self.stop_token_ids or (self.constraint is not None and self._is_complete()):
            self.owner.end_choice(choice, "stop")
        elif self._decode is not None and (stop := self._matched_stop()) is not None:
            self.owner.end_choice(choice, "stop", stop)
        elif len(choice.token_ids) >= self._max_tokens:
            self.owner.end_choice(choice, "length")
        if self.owner.request.has_token_events:
            event = TokenEvent(choice.index, token_id, logprob, version, top or [], choice.finish_reason, choice.stop)
            self.owner.listener.on_token(event)

    def _is_complete(self) -> bool:
        # Where there is no end token to sample, a grammar that is fulfilled is the end.
        assert self.constraint is not None
        return not self.stop_token_ids and self.constraint.is_done

    def _matched_stop(self) -> str | None:
        # Only the end of the text can hold a new match; the window is wide enough for four tokens a character.
        assert self._decode is not None, "a sequence with stop strings has a decoder of text"
        tail = self._decode(self.choice.token_ids[-self._stop_window :])
        found = [(position, stop) for stop in self.params.stop if (position := tail.find(stop)) >= 0]
        return min(found)[1] if found else None
