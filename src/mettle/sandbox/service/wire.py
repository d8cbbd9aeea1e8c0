"""Values as JSON and back, exactly: tests, verdicts, results and reports, with the Python values in them.

Plain text, numbers, lists and objects are themselves. What JSON has no form for is an object with one key that starts
with `$`: bytes, tuples, sets, dictionaries with other keys, large or odd numbers, and the known records by name.

Invariant: unpack(pack(v)) == v with equal types at every depth; unpacking makes nothing but plain values and the
records listed here, and anything else is a `UserError`.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

from mettle.errors import UserError
from mettle.sandbox import isolation
from mettle.sandbox.judge import verdicts
from mettle.sandbox.languages import LanguageReport
from mettle.sandbox.machines.commands import ExecResult
from mettle.sandbox.machines.files import Entry
from mettle.sandbox.zygote.values import require_spread

_SAFE_INT: Final = 1 << 53
_MAX_DEPTH: Final = 100


def _records(*modules: Any) -> dict[str, type[Any]]:
    found = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    kinds = [kind for kind in found if kind.__module__.startswith("mettle.")]
    return {kind.__name__: kind for kind in kinds if is_dataclass(kind) or issubclass(kind, Enum)}


_KINDS: Final = {
    **_records(verdicts, isolation),
    "ExecResult": ExecResult,
    "Entry": Entry,
    "LanguageReport": LanguageReport,
}


def pack(value: Any, depth: int = 0) -> Any:
    """The value as JSON takes it. Raises: UserError for a type that does not travel."""
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise UserError(f"a value nested deeper than {_MAX_DEPTH} cannot be sent to a sandbox service")
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < _SAFE_INT else {"$int": format(value, "x")}
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [pack(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return _pack_mapping(value, depth)
    if kind in (tuple, set, frozenset):
        return {f"${kind.__name__}": [pack(item, depth + 1) for item in value]}
    return _pack_record(value, depth)


def _pack_mapping(value: Mapping[Any, Any], depth: int) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: pack(item, depth + 1) for key, item in value.items()}
    return {"$dict": [[pack(key, depth + 1), pack(item, depth + 1)] for key, item in value.items()]}


def _pack_record(value: Any, depth: int) -> Any:
    kind = type(value)
    if _KINDS.get(kind.__name__) is not kind:
        raise UserError(f"a value of type {kind.__name__} cannot be sent to a sandbox service; use plain Python values")
    if isinstance(value, Enum):
        return {"$enum": [kind.__name__, value.value]}
    held = {field.name: pack(getattr(value, field.name), depth + 1) for field in fields(value)}
    return {"$record": kind.__name__, **held}


def unpack(data: Any) -> Any:
    """The value that `pack` was given. Raises: UserError for data that it would not have made."""
    try:
        return _unpack(data)
    except (ValueError, TypeError, KeyError, binascii.Error, RecursionError, OverflowError) as error:
        raise UserError(f"this is not an encoded value: {type(error).__name__}: {str(error)[:200]}") from error


def _unpack(data: Any) -> Any:
    if isinstance(data, list):
        return [_unpack(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "$record" in data:
        held = {name: _unpack(item) for name, item in data.items() if name != "$record"}
        return _KINDS[data["$record"]](**held)
    if len(data) == 1 and next(iter(data)).startswith("$"):
        [(tag, body)] = data.items()
        return _READERS[tag](body)
    return {name: _unpack(item) for name, item in data.items()}


def _spread(members: list[Any]) -> list[Any]:
    """As they are, if a set of them can be made in good time."""
    require_spread(members)
    return members


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "$int": lambda body: int(body, 16),
    "$float": float,
    "$bytes": lambda body: base64.b64decode(body, validate=True),
    "$tuple": lambda body: tuple(_unpack(body)),
    "$set": lambda body: set(_spread(_unpack(body))),
    "$frozenset": lambda body: frozenset(_spread(_unpack(body))),
    "$dict": lambda body: dict(
        zip(_spread([_unpack(key) for key, _ in body]), [_unpack(v) for _, v in body], strict=True)
    ),
    "$enum": lambda body: _KINDS[body[0]](body[1]),
}
