"""A rollout's conversation as it is shown: each assistant message with the tokens that were sampled for it.

A turn belongs to the assistant message at the same place from the end: a prompt may hold examples of answers that
nobody sampled. Turns without a message (a conversation rewritten on the way) are shown after the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mettle.hub.models import RolloutDetail, TurnDetail

MAX_TOKENS_SHOWN = 12_000
"""Tokens of one turn that are put on the page; the API has them all."""
_MOST = 80.0
"""A ratio beyond e to this is shown as that."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One sampled token. `new_version` is set where the policy version changes; `advantage`, `is_trained` and
    `trainer_logprob` are None where nothing is known of them."""

    text: str
    token_id: int
    logprob: float
    version: int
    new_version: int | None
    advantage: float | None = None
    is_trained: bool | None = None
    trainer_logprob: float | None = None

    @property
    def ratio(self) -> float | None:
        """The trainer's probability of the token over the sampler's, when it trained on it."""
        return None if self.trainer_logprob is None else math.exp(min(self.trainer_logprob - self.logprob, _MOST))

    @property
    def mismatch(self) -> float | None:
        """What the token adds to `mismatch_kl/mean`, in nats: r - 1 - log r, 0 where both agree."""
        if self.trainer_logprob is None:
            return None
        log_ratio = self.trainer_logprob - self.logprob
        return math.expm1(min(log_ratio, _MOST)) - log_ratio


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message, or a turn that has none."""

    role: str
    text: str
    reasoning: str
    tool_calls: tuple[tuple[str, str], ...]
    turn: TurnDetail | None = None

    def tokens(self) -> Iterator[ShownToken]:
        """The sampled tokens with their places."""
        if self.turn is None:
            return
        columns, before = self.turn.tokens, None
        for place in range(min(len(columns.ids), MAX_TOKENS_SHOWN)):
            version = columns.versions[place]
            yield ShownToken(
                columns.texts[place],
                columns.ids[place],
                columns.logprobs[place],
                version,
                version if before is not None and version != before else None,
                None if columns.advantages is None else columns.advantages[place],
                None if columns.is_trained is None else columns.is_trained[place],
                None if columns.trainer_logprobs is None else columns.trainer_logprobs[place],
            )
            before = version

    @property
    def num_hidden(self) -> int:
        """Tokens that are not put on the page."""
        return 0 if self.turn is None else max(0, len(self.turn.tokens.ids) - MAX_TOKENS_SHOWN)


def shown_messages(detail: RolloutDetail) -> list[ShownMessage]:
    """The conversation, prompt first."""
    places = [i for i, message in enumerate(detail.messages) if message.get("role") == "assistant"]
    matched = min(len(places), len(detail.turns))
    turn_of = dict(zip(places[len(places) - matched :], detail.turns[len(detail.turns) - matched :], strict=True))
    shown = [_shown(message, turn_of.get(i)) for i, message in enumerate(detail.messages)]
    unmatched = detail.turns[: len(detail.turns) - matched]
    return shown + [ShownMessage("sampled", "", "", (), turn) for turn in unmatched]


def _shown(message: dict[str, Any], turn: TurnDetail | None) -> ShownMessage:
    calls = message.get("tool_calls") or []
    return ShownMessage(
        role=str(message.get("role", "?")),
        text=text_of(message.get("content")),
        reasoning=text_of(message.get("reasoning_content")),
        tool_calls=tuple(_call(call) for call in calls) if isinstance(calls, list) else (),
        turn=turn,
    )


def text_of(content: Any) -> str:
    """A message's content as text; parts that are no text by their type."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return json.dumps(content, ensure_ascii=False, default=str)


def _part(part: Any) -> str:
    if isinstance(part, dict):
        return str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"
    return str(part)


def _call(call: Any) -> tuple[str, str]:
    if isinstance(call, str):  # as published rows have them
        with suppress(ValueError, RecursionError):
            call = json.loads(call)
    if not isinstance(call, dict):
        return "call", str(call)
    function = call.get("function")
    source = function if isinstance(function, dict) else call
    arguments = source.get("arguments", "")
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    return str(source.get("name", "call")), shown
