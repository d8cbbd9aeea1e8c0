"""A finished rollout as it is published: one row, one JSON line.

Parts: `task_key_of` (what task it was), `saved_messages`, `json_line`. The files are in `results`. The format is that
of verifiers 0.3: assistant tool calls as JSON strings, each metric again as a key of the row; what Mettle adds stands
under keys of its own (`task_key`). Invariant: a row is one line of valid JSON in UTF-8, whatever an environment put
into it: a figure that is not finite is null, half a surrogate pair is escaped, an object is its text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

TASK_FIELDS = ("prompt", "answer", "info")


def task_key_of(row: Mapping[str, Any]) -> str:
    """A task's identity: a hash of what is asked and expected, the same in every process.

    `example_id` is a place in the dataset, which says nothing once the dataset has changed.
    """
    task = {name: row[name] for name in TASK_FIELDS if row.get(name)}
    text = json.dumps(task, sort_keys=True, default=lambda value: type(value).__qualname__, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def saved_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain dicts; tool calls as JSON strings."""
    saved = []
    for message in messages:
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("tool_calls"):
            plain["tool_calls"] = [c if isinstance(c, str) else json.dumps(c) for c in plain["tool_calls"]]
        saved.append(plain)
    return saved


def json_line(output: Mapping[str, Any]) -> str:
    """A row as one line that UTF-8 can hold."""
    try:
        line = json.dumps(output, ensure_ascii=False, default=as_json, allow_nan=False) + "\n"
        if not line.isascii():
            line.encode()
        return line
    except (ValueError, TypeError, RecursionError):  # UnicodeEncodeError is a ValueError
        return json.dumps(_plain(output, ()), default=as_json) + "\n"


def as_json(value: Any) -> Any:
    """What JSON does not know, as something it does."""
    if isinstance(value, Mapping):
        return dict(value)
    for method in ("model_dump", "to_dict", "tolist"):
        if hasattr(value, method):
            return getattr(value, method)()
    return str(value)


def _plain(value: Any, inside: tuple[int, ...]) -> Any:
    """A copy that JSON can hold; what contains itself ends where it begins again."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if id(value) in inside or len(inside) > 100:
        return f"<{type(value).__name__}>"
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, inside) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, inside) for item in value]
    return _plain(as_json(value), inside)
