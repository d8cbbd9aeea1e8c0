"""A rollout as blocks to draw: one for each thing that was said, thought, called or reported.

Parts: `Block`, `blocks_of` (a conversation), `json_block` (a row as it was saved). Invariant: a block's `body` is
printable and bounded; `raw` is what was saved, whole, for the clipboard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mettle.evals.output import messages_of
from mettle.records.tasks import content_of
from mettle.tui.search import call_of
from mettle.wording import one_line, printable

BODY_CHARS = 1_000_000
"""A longer text is cut where it is shown until more is asked for."""

MAX_INDENTED_CHARS = 200_000


@dataclass(slots=True)
class Block:
    """One part of a conversation. `kind` is a role, or reasoning, call, error, answer, json."""

    kind: str
    title: str
    body: str
    raw: str
    message: int
    is_open: bool = True
    is_markdown: bool = False
    num_left_out: int = 0


def blocks_of(row: Mapping[str, Any], limit: int = BODY_CHARS) -> list[Block]:
    """What happened in a rollout, in order."""
    prompt, completion = messages_of(row.get("prompt")), messages_of(row.get("completion"))
    blocks: list[Block] = []
    names: dict[str, str] = {}
    for number, message in enumerate([*prompt, *completion]):
        blocks += _message_blocks(message, number, names, limit)
    error = row.get("error")
    if error:
        blocks.append(_error_block(row, error, len(prompt) + len(completion), limit))
    return blocks


def json_block(row: Mapping[str, Any], limit: int = BODY_CHARS) -> Block:
    """The row as JSON."""
    raw = json.dumps(row, ensure_ascii=False, indent=2)
    return _block("json", "saved row", raw, 0, limit)


def _message_blocks(message: Mapping[str, Any], number: int, names: dict[str, str], limit: int) -> Iterator[Block]:
    role = str(message.get("role") or "text")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        block = _block("reasoning", "reasoning", str(reasoning), number, limit)
        block.is_open = False
        yield block
    content = content_of(message)
    calls = message.get("tool_calls") or []
    title = one_line(role, 30)
    if role == "tool":
        name = names.get(str(message.get("tool_call_id"))) or str(message.get("name") or "")
        title = f"result of {one_line(name, 60)}" if name else "tool result"
    if content or not (reasoning or calls):
        block = _block(role, title, content, number, limit)
        block.is_markdown = role in ("assistant", "user", "system", "developer", "text")
        yield block
    for call in calls if isinstance(calls, list) else []:
        name, arguments = call_of(call)
        identity = _identity(call)
        if identity:
            names[identity] = name
        yield _block("call", f"calls {one_line(name, 60) or 'a tool'}", _indented(arguments), number, limit)


def _error_block(row: Mapping[str, Any], error: Any, number: int, limit: int) -> Block:
    told = error if isinstance(error, Mapping) else {"message": error}
    kind = f" ({one_line(told['kind'], 40)})" if told.get("kind") else ""
    lines = [str(told.get("message") or "")]
    for name in ("error_chain_str", "error_chain_repr", "traceback"):
        if told.get(name):
            lines.append(str(told[name]))
    lines += [str(row[name]) for name in ("error_chain", "long_error_chain") if row.get(name)]
    text = "\n".join(dict.fromkeys(line for line in lines if line))
    return _block("error", f"{one_line(told.get('error') or 'error', 80)}{kind}", text, number, limit)


def _block(kind: str, title: str, raw: str, number: int, limit: int) -> Block:
    return Block(kind, title, printable(raw[:limit]), raw, number, num_left_out=max(0, len(raw) - limit))


def _identity(call: Any) -> str:
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            return ""
    return str(call.get("id") or "") if isinstance(call, Mapping) else ""


def _indented(arguments: str) -> str:
    """Arguments as `name: value` lines where they are an object, as they are where not."""
    if len(arguments) > MAX_INDENTED_CHARS:
        return arguments
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(values, dict):
        return arguments
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in values.items()
    )
