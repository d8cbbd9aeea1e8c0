"""JSON of values that others made: whatever they hold, the text is valid and on one line.

Invariant: a figure that is not finite is null, half a surrogate pair is escaped, an object is its text, and what
contains itself ends where it begins again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 100


def json_text(value: Any, *, is_compact: bool = False) -> str:
    """`value` as one line of JSON that UTF-8 can hold; `is_compact` is without blanks and in ASCII."""
    try:
        text = _COMPACT(value) if is_compact else _READABLE(value)
        if not text.isascii():
            text.encode()
        return text
    except (ValueError, TypeError, RecursionError):  # UnicodeEncodeError is a ValueError
        return json.dumps(_plain(value, ()), default=as_json, separators=(",", ":") if is_compact else None)


def as_json(value: Any) -> Any:
    """What JSON does not know, as something it does."""
    if isinstance(value, Mapping):
        return dict(value)
    for method in ("model_dump", "to_dict", "tolist"):
        if hasattr(value, method):
            return getattr(value, method)()
    return str(value)


def _plain(value: Any, inside: tuple[int, ...]) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if id(value) in inside or len(inside) > MAX_DEPTH:
        return f"<{type(value).__name__}>"
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, inside) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, inside) for item in value]
    return _plain(as_json(value), inside)


_READABLE = json.JSONEncoder(ensure_ascii=False, default=as_json, allow_nan=False).encode
_COMPACT = json.JSONEncoder(default=as_json, allow_nan=False, separators=(",", ":")).encode
