"""What was said in a rollout, so that a message that an agent repeats is recognised as the one that was sampled.

An agent sends the whole conversation with every call, in its own words: without the thoughts (most APIs have no place
for them), with arguments written anew, with white space trimmed. Parts: `Memory`. A message is recognised by all that
came before it and by what it says, and is then replaced by the message that it repeats; so the sampled ids can be
extended, and a conversation is kept once however often it is sent. Invariant: a message that says anything else
(another text, another argument, a thought of its own) stays as it is: history was rewritten, and the rollout branches.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mettle.records.messages import AssistantMessage, Message, content_text

_START = 0


class Memory:
    """The conversations of one rollout."""

    def __init__(self) -> None:
        self._known: dict[int, Message] = {}
        self._sampled: dict[int, AssistantMessage] = {}
        self._ends: dict[int, Any] = {}

    def recognise(self, messages: Sequence[Message]) -> list[Message]:
        """The same conversation, every message that repeats an earlier one replaced by it."""
        chain = _START
        found: list[Message] = []
        for message in messages:
            chain = _extended(chain, message)
            sampled = self._sampled.get(chain)
            if sampled is not None and _repeats(message, sampled):
                found.append(sampled)
                continue
            known = self._known.setdefault(chain, message)
            found.append(known if known == message else message)
        return found

    def remember(self, prompt: Sequence[Message], said: AssistantMessage, step: Any) -> None:
        """Keep what the model said after `prompt`, in trajectory step `step`."""
        chain = _extended(_chain(prompt), said)
        self._sampled[chain] = said
        self._ends[chain] = step

    def step_before(self, prompt: Sequence[Message]) -> Any:
        """The step that `prompt` continues, the longest if there are several; None when it continues none."""
        chain, found = _START, None
        for message in prompt:
            chain = _extended(chain, message)
            found = self._ends.get(chain, found)
        return found


def _chain(messages: Sequence[Message]) -> int:
    chain = _START
    for message in messages:
        chain = _extended(chain, message)
    return chain


def _extended(chain: int, message: Mapping[str, Any]) -> int:
    content = message.get("content")
    role = message["role"]
    if role == "assistant":
        calls = tuple(_call_key(call) for call in message.get("tool_calls") or ())
        return hash((chain, role, content_text(content).strip(), calls))
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hash((chain, role, text, message.get("tool_call_id")))


def _call_key(call: Mapping[str, Any]) -> tuple[Any, ...]:
    arguments = call.get("arguments")
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    return call.get("id"), call.get("name"), arguments


def _repeats(message: Mapping[str, Any], sampled: Mapping[str, Any]) -> bool:
    """True when the thought that `message` carries, if it does, is the sampled one."""
    thought = message.get("reasoning_content")
    return not thought or thought.strip() == (sampled.get("reasoning_content") or "").strip()
