"""What a command's request says, read without pydantic, which no image has; `service/bodies.py` is its model.

Invariant: a field of the wrong type is a `UserError` that names it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from mettle.errors import UserError

T = TypeVar("T")
MAX_OUTPUT_BYTES: Final = 64 << 20


def take(body: Mapping[str, Any], name: str, kind: type[T] | tuple[type[T], ...], default: T) -> T:
    """One field of a body, of the right type. Raises: UserError that names it."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise UserError(f"{name} is {str(value)[:80]!r}; it must be a {' or '.join(k.__name__ for k in kinds)}")
    return value


def seconds(body: Mapping[str, Any], name: str, default: float | None) -> float | None:
    """A time limit; null is none."""
    value = body.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise UserError(f"{name} is {str(value)[:80]!r}; it must be a number of seconds above 0, or null")
    return float(value)


def texts(body: Mapping[str, Any], name: str) -> dict[str, str]:
    """A mapping of strings to strings."""
    found: dict[str, Any] = take(body, name, dict, {})
    if not all(isinstance(value, str) for value in found.values()):
        raise UserError(f"{name} must map strings to strings")
    return dict(found)


def take_bytes(body: Mapping[str, Any], name: str) -> bytes | None:
    """`name` as text, or `name_base64` as any bytes."""
    encoded = take(body, f"{name}_base64", str, "")
    if encoded:
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise UserError(f"{name}_base64 is not base64: {error}") from None
    text = body.get(name)
    return None if text is None else take(body, name, str, "").encode("utf-8", "surrogateescape")


def command_order(body: Mapping[str, Any], timeout_s: float | None) -> dict[str, Any]:
    """The arguments of a command. Raises: UserError."""
    command: Any = body.get("command")
    is_list = isinstance(command, list) and all(isinstance(word, str) for word in command)
    if not command or not (is_list or isinstance(command, str)):
        raise UserError("command must be a string for `sh -c`, or a list of strings; it is empty or something else")
    max_output = take(body, "max_output_bytes", int, 1 << 20)
    if not 0 <= max_output <= MAX_OUTPUT_BYTES:
        raise UserError(f"max_output_bytes is {max_output}; it must be from 0 to {MAX_OUTPUT_BYTES}")
    return {
        "command": command,
        "cwd": take(body, "cwd", str, "/work"),
        "env": texts(body, "env"),
        "stdin": take_bytes(body, "stdin"),
        "timeout_s": seconds(body, "timeout_s", timeout_s),
        "max_output_bytes": max_output,
    }
