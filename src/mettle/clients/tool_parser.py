"""From sampled text to a turn: the thought, the tool calls, and what remains as content.

Two conventions of the field are read: a thought between `<think>` and `</think>` at the start of the turn (the opening
mark may stand in the prompt), and Hermes tool calls, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
Invariant: nothing is repaired. A tool call that is not valid JSON stays in the content, where the environment sees it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import NamedTuple

from mettle.records.spans import spans

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
TOOL_OPEN = "<tool_call>"
TOOL_CLOSE = "</tool_call>"


class ParsedToolCall(NamedTuple):
    """One tool call. `arguments` is a JSON object as text, as the OpenAI API has it."""

    id: str
    name: str
    arguments: str


class ParsedTurn(NamedTuple):
    """What an assistant said in one turn. `reasoning_content` is None when there was no thought."""

    content: str
    reasoning_content: str | None
    tool_calls: tuple[ParsedToolCall, ...]


class Thought(NamedTuple):
    """A turn's text split at its thought."""

    reasoning: str | None
    rest: str


def new_call_id() -> str:
    """A fresh id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def parse_turn(text: str, *, has_tools: bool, new_id: Callable[[], str] = new_call_id) -> ParsedTurn:
    """Split the text of a completion. Tool calls are read only when the request offered tools."""
    thought = split_thought(text)
    if not has_tools:
        return ParsedTurn(thought.rest, thought.reasoning, ())
    content, calls = parse_tool_calls(thought.rest, new_id)
    return ParsedTurn(content, thought.reasoning, calls)


def split_thought(text: str) -> Thought:
    """The thought and the rest. A thought that was never closed takes the whole text."""
    head, close, rest = text.partition(THINK_CLOSE)
    has_open = head.lstrip().startswith(THINK_OPEN)
    if not close and not has_open:
        return Thought(None, text)
    reasoning = head.lstrip()[len(THINK_OPEN) :] if has_open else head
    return Thought(reasoning.strip("\n"), rest.lstrip("\n"))


def parse_tool_calls(text: str, new_id: Callable[[], str] = new_call_id) -> tuple[str, tuple[ParsedToolCall, ...]]:
    """The content without the tool calls in it (nor newlines at its end, if there were any), and the calls in order."""
    calls: list[ParsedToolCall] = []
    kept: list[str] = []
    read_to = 0
    for span in spans(text, TOOL_OPEN, TOOL_CLOSE):
        call = _read_call(span.inside, new_id)
        if call is not None:
            calls.append(call)
            kept.append(text[read_to : span.start])
            read_to = span.end
    content = "".join([*kept, text[read_to:]])
    return (content.rstrip("\n") if calls else content), tuple(calls)


def _read_call(body: str, new_id: Callable[[], str]) -> ParsedToolCall | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        return ParsedToolCall(new_id(), call["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return ParsedToolCall(new_id(), call["name"], json.dumps(arguments, ensure_ascii=False))
