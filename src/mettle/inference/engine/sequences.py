"""A request under way: the sequences of its choices, when each of them ends, and what its listener is told.

No torch here. Invariant: a sequence gets no token after it has ended, and its lists grow together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mettle.errors import MettleError
from mettle.inference.engine.protocol import (
    Choice,
    FinishReason,
    Generation,
    GenerationRequest,
    TokenEvent,
    TokenListener,
    TokenLogprob,
)

DecodeText = Callable[[Sequence[int]], str]
"""Ids to the text in which stop strings are looked for."""

_MAX_TOKENS_PER_CHARACTER = 4


class RunningRequest:
    """One request: `open_choices` of its sequences have not ended yet."""

    def __init__(self, request: GenerationRequest, listener: TokenListener) -> None:
        self.request = request
        self.listener = listener
        self.prompt_logprobs: list[float | None] | None = None
        self.choices = tuple(Choice(i) for i in range(request.n))
        self.num_open = request.n
        self.is_settled = False

    @property
    def num_slots(self) -> int:
        """Slots that the request needs; none when it only scores its prompt."""
        return 0 if self.request.params.max_tokens == 0 else self.request.n

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
                Generation(request.request_id, len(request.prompt_ids), self.choices, self.prompt_logprobs)
            )

    def fail(self, error: MettleError) -> None:
        """Tell the listener that the engine failed."""
        if not self.is_settled:
            self.is_settled = True
            self.listener.on_failure(error)

    def abort(self) -> None:
        """End what has not ended, and tell."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self.end_choice(choice, "abort")
                if self.request.has_token_events:
                    self.listener.on_token(TokenEvent(choice.index, None, 0.0, -1, [], "abort", None))
        self.finish()


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
    """One choice that is being sampled. `length` counts its tokens, the newest of which is not in the KV cache yet."""

    __slots__ = (
        "_decode",
        "_max_tokens",
        "_stop_window",
        "choice",
        "length",
        "noise",
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
    ) -> None:
        self.owner, self.choice, self.noise = owner, choice, noise
        self.params = owner.request.params
        self.num_top_logprobs = owner.request.top_logprobs
        self.stop_token_ids = stop_token_ids
        self.length = len(owner.request.prompt_ids)
        self._max_tokens = max_tokens
        self._decode = decode if self.params.stop else None
        longest = max((len(s) for s in self.params.stop), default=0)
        self._stop_window = (longest + 1) * _MAX_TOKENS_PER_CHARACTER

    @property
    def has_ended(self) -> bool:
        """True when no more tokens are wanted."""
        return self.choice.finish_reason is not None

    def add(self, token_id: int, logprob: float, version: int, top: list[TokenLogprob] | None) -> None:
        """Take a sampled token, decide whether it was the last, and tell a listener that hears tokens."""
        choice = self.choice
        choice.token_ids.append(token_id)
        choice.logprobs.append(logprob)
        choice.versions.append(version)
        self.length += 1
        if top is not None:
            choice.top_logprobs.append(top)
        if token_id in self.stop_token_ids:
            self.owner.end_choice(choice, "stop")
        elif self._decode is not None and (stop := self._matched_stop()) is not None:
            self.owner.end_choice(choice, "stop", stop)
        elif len(choice.token_ids) >= self._max_tokens:
            self.owner.end_choice(choice, "length")
        if self.owner.request.has_token_events:
            event = TokenEvent(choice.index, token_id, logprob, version, top or [], choice.finish_reason, choice.stop)
            self.owner.listener.on_token(event)

    def _matched_stop(self) -> str | None:
        # Only the end of the text can hold a new match; the window is wide enough for four tokens a character.
        assert self._decode is not None, "a sequence with stop strings has a decoder of text"
        tail = self._decode(self.choice.token_ids[-self._stop_window :])
        found = [(position, stop) for stop in self.params.stop if (position := tail.find(stop)) >= 0]
        return min(found)[1] if found else None
