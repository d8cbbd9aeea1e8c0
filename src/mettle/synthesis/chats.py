"""A rollout as chats for supervised fine-tuning.

Parts: `Chat`, `chats_of`. A chat ends with what the model said after a user message, because that is what trains (see
`mettle.trainer.demonstrations`); a conversation of several user turns becomes one chat for each. Messages are in the
form of the chat completions API, which our trainer and others read. Invariant: the words are those of the rollout; with
`strip`, thoughts are left out whole, whether the model marked them or the endpoint took them apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mettle.records.messages import tool_call_from, tool_from

Reasoning = Literal["keep", "strip"]

_THOUGHTS = re.compile(r"<think>.*?</think>\s*|<think>.*\Z|\A[^<]*</think>\s*", re.DOTALL)
_HIDDEN = ("reasoning_content", "thinking_blocks", "reasoning_details")


class Unusable(ValueError):
    """A rollout that no chat can be made of; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages that end with the model's, and the tools that it had. `turn` counts user turns from 1."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    turn: int
    num_turns: int


def chats_of(row: Mapping[str, Any], reasoning: Reasoning) -> list[Chat]:
    """The chats of one row of results.

    Raises: Unusable when the prompt is bare text, the model said nothing, or something in it is no text.
    """
    prompt, completion = row.get("prompt"), row.get("completion")
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise Unusable("not a conversation")
    try:
        messages = [_message(message, reasoning) for message in (*prompt, *completion)]
        tools = [_tool(tool) for tool in row.get("tool_defs") or []]
    except Unusable:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Unusable("a message that cannot be read") from error
    ends = list(_ends(messages, len(prompt)))
    if not ends:
        raise Unusable("no answer")
    return [Chat(messages[:end], tools, turn, len(ends)) for turn, end in enumerate(ends, 1)]


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """All that is said in some messages, calls included: what copies are recognised by."""
    parts = []
    for message in messages:
        parts.append(str(message.get("content") or ""))
        parts += [
            f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls", ())
        ]
    return "\n".join(parts)


def _ends(messages: Sequence[Mapping[str, Any]], start: int) -> Iterator[int]:
    """Where chats end: after the last assistant message before each user message, and before the end."""
    said = None
    for index in range(start, len(messages)):
        role = messages[index]["role"]
        if role == "assistant":
            said = index + 1
        elif role == "user" and said is not None:
            yield said
            said = None
    if said is not None:
        yield said


def _message(message: Mapping[str, Any], reasoning: Reasoning) -> dict[str, Any]:
    role = message["role"]
    plain = {key: value for key, value in message.items() if value is not None}
    calls = plain.pop("tool_calls", None)
    if role == "assistant" and reasoning == "strip":
        plain = {key: value for key, value in plain.items() if key not in _HIDDEN}
        if isinstance(plain.get("content"), str):
            plain["content"] = _THOUGHTS.sub("", plain["content"]).strip()
    if calls:
        plain["tool_calls"] = [_call(call) for call in calls]
    plain.setdefault("content", "")
    if role == "assistant" and not calls and not str(plain["content"]).strip():
        raise Unusable("an empty answer")
    if not isinstance(plain["content"], str) and not all(part.get("type") == "text" for part in plain["content"]):
        raise Unusable("not text alone")
    return plain


def _call(raw: Any) -> dict[str, Any]:
    call = tool_call_from(raw)
    json.loads(call["arguments"])  # A call that no environment could read is nothing to imitate.
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}


def _tool(raw: Any) -> dict[str, Any]:
    tool = tool_from(raw)
    return {"type": "function", "function": {key: value for key, value in tool.items() if value is not None}}
