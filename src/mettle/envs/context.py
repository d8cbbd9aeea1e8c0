"""Keeping a conversation within a token budget.

Parts: `ContextPolicy` (what a multi-turn environment asks), `ContextWindow` (the policy that is here), `turns_of`,
`estimate_for`.
A policy rewrites only what the model sees next. Invariants: the prompt, what the model said in the kept turns, and the
pairing of tool calls with their answers stay; messages are replaced, never changed in place; a rewritten conversation
is another branch of the rollout (its shared token prefix is shorter), so nothing is trained in a context that the
model did not see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mettle.envs.state import State
from mettle.records.messages import Message, Messages, ToolMessage, content_text

CHARACTERS_PER_TOKEN = 4.0
TOKENS_PER_IMAGE = 1000
TOKENS_PER_MESSAGE = 4
LEFT_OUT_LENGTH = 40
CountTokens = Callable[[Message], int]


class ContextPolicy(Protocol):
    """Decides what of a conversation the model sees."""

    def fit(self, messages: Messages, state: State) -> Messages:
        """The conversation to send: `messages` itself when it fits, else another list."""
        ...


class ContextWindow:
    """Within `max_tokens`, the model sees everything; beyond, old tool results are cut, then old turns left out.

    A rewrite goes down to `refill` of the budget, so that it happens every few turns and not every turn. The last
    `keep_last_turns` turns stay whole unless their own tool results are too long. `count` counts a message's tokens;
    left out, they are estimated from the characters, scaled by what the endpoint counted for the previous call.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        keep_last_turns: int = 2,
        refill: float = 0.7,
        cut_result_to: int = 200,
        count: CountTokens | None = None,
    ) -> None:
        if max_tokens < 1 or not 0.0 < refill <= 1.0 or keep_last_turns < 0 or cut_result_to < 0:
            raise ValueError("a context window wants max_tokens >= 1, 0 < refill <= 1, and nothing negative")
        self.max_tokens = max_tokens
        self.keep_last_turns = keep_last_turns
        self.refill = refill
        self.cut_result_to = cut_result_to
        self.count = count

    def fit(self, messages: Messages, state: State) -> Messages:
        """The conversation to send."""
        count = self.count or estimate_for(state)
        if sum(map(count, messages)) <= self.max_tokens:
            return messages
        num_fixed = min(len(state["prompt"]), len(messages))
        fixed, turns = messages[:num_fixed], turns_of(messages[num_fixed:])
        room = int(self.max_tokens * self.refill) - sum(map(count, fixed))
        num_old = max(0, len(turns) - self.keep_last_turns)
        turns = self._cut_results(turns, range(num_old), room, count)
        while num_old and _size(turns, count) > room:
            del turns[0]
            num_old -= 1
        turns = self._cut_results(turns, range(len(turns)), room, count)
        return [*fixed, *(message for turn in turns for message in turn)]

    def _cut_results(
        self, turns: list[Messages], positions: Sequence[int], room: int, count: CountTokens
    ) -> list[Messages]:
        """Shorten tool results, the oldest first, until `room` is enough or nothing is left to shorten."""
        size = _size(turns, count)
        for position in positions:
            if size <= room:
                break
            shorter = [self._cut(message) for message in turns[position]]
            size += sum(map(count, shorter)) - sum(map(count, turns[position]))
            turns[position] = shorter
        return turns

    def _cut(self, message: Message) -> Message:
        text = content_text(message.get("content"))
        is_image = isinstance(message.get("content"), list)
        if message.get("role") != "tool" or (len(text) <= self.cut_result_to + LEFT_OUT_LENGTH and not is_image):
            return message
        left_out = f"[{max(0, len(text) - self.cut_result_to)} characters left out]"
        return ToolMessage({**message, "content": f"{text[: self.cut_result_to]} {left_out}"})


def turns_of(messages: Messages) -> list[Messages]:
    """A conversation's turns: each an assistant message with all that follows it up to the next."""
    turns: list[Messages] = []
    for message in messages:
        if not turns or message.get("role") == "assistant":
            turns.append([])
        turns[-1].append(message)
    return turns


def num_characters(message: Message) -> int:
    """Characters of everything in a message that a model reads as text."""
    calls = message.get("tool_calls") or ()
    called = sum(len(str(call.get("name"))) + len(str(call.get("arguments"))) for call in calls)
    return len(content_text(message.get("content"))) + len(message.get("reasoning_content") or "") + called


def estimate_for(state: State) -> CountTokens:
    """An estimate of a message's tokens, scaled to what the endpoint counted for the rollout's previous call."""
    per_token = CHARACTERS_PER_TOKEN
    last: Any = state["trajectory"][-1] if state["trajectory"] else None
    usage = getattr(last["response"], "usage", None) if last else None
    if usage is not None and usage.prompt_tokens:
        overhead = TOKENS_PER_MESSAGE * len(last["prompt"])
        characters = sum(map(num_characters, last["prompt"]))
        # A template's own text or an image would make the scale absurd; within these bounds it is a language's.
        per_token = min(8.0, max(1.0, characters / max(1, usage.prompt_tokens - overhead)))

    def count(message: Message) -> int:
        content = message.get("content")
        num_images = sum(part.get("type") == "image_url" for part in content) if isinstance(content, list) else 0
        return TOKENS_PER_MESSAGE + int(num_characters(message) / per_token) + 1 + num_images * TOKENS_PER_IMAGE

    return count


def _size(turns: list[Messages], count: CountTokens) -> int:
    return sum(count(message) for turn in turns for message in turn)
