"""Exact Python values as bytes, for function-call tests: the value travels out and is compared by the owner.

Only values whose type is exactly one of the plain ones are encoded, so an object that claims to equal everything has
no form here. Every value is tagged with its type: True is not 1, 1 is not 1.0, a tuple is not a list.
Invariant: decode(encode(v)) == v with equal types at every depth, and nan stays nan.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, Final

MAX_DEPTH: Final = 50
MAX_INT_BITS: Final = 14_240  # of up to 4,300 digits: what Python itself still prints
_MAX_SAME_HASH: Final = 256


class UnencodableValue(ValueError):
    """The value's type, depth or size has no encoding."""


def encode(value: object) -> bytes:
    """The bytes of a value; UnencodableValue if it holds anything but plain types, or nests or counts too far."""
    return json.dumps(_tag(value, 0), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """The value of `encode`'s bytes; UnencodableValue if they are anything else. The bytes are not trusted."""
    try:
        return _untag(json.loads(data), 0)
    except UnencodableValue:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise UnencodableValue(f"not an encoded value: {type(error).__name__}") from error


def _tag(value: object, depth: int) -> list[Any]:
    if depth > MAX_DEPTH:
        raise UnencodableValue(f"nested deeper than {MAX_DEPTH}")
    kind = type(value)
    if value is None or kind is bool:
        return ["c", value]
    if kind is int:
        return _tag_int(value)  # type: ignore[arg-type]
    if kind is float:
        return ["f", value.hex()]  # type: ignore[attr-defined]
    if kind is str:
        return ["s", value]
    if kind is bytes:
        return ["b", value.hex()]  # type: ignore[attr-defined]
    return _tag_container(value, depth)


def _tag_int(value: int) -> list[Any]:
    if value.bit_length() > MAX_INT_BITS:
        raise UnencodableValue(f"an int of more than {MAX_INT_BITS} bits")
    return ["i", format(value, "x")]


def _tag_container(value: object, depth: int) -> list[Any]:
    if type(value) is list:
        return ["l", [_tag(item, depth + 1) for item in value]]
    if type(value) is tuple:
        return ["t", [_tag(item, depth + 1) for item in value]]
    if type(value) is dict:
        return ["d", [[_tag(key, depth + 1), _tag(item, depth + 1)] for key, item in value.items()]]
    if type(value) is set or type(value) is frozenset:
        tagged = [_tag(item, depth + 1) for item in value]
        return ["e" if type(value) is set else "z", sorted(tagged, key=json.dumps)]
    raise UnencodableValue(f"a value of type {type(value).__name__} cannot be compared; return plain Python values")


def _untag(tagged: Any, depth: int) -> Any:
    if depth > MAX_DEPTH or type(tagged) is not list or len(tagged) != 2:
        raise UnencodableValue("not an encoded value")
    tag, body = tagged
    if tag == "c" and (body is None or type(body) is bool):
        return body
    if type(body) is str:
        return _untag_text(tag, body)
    if type(body) is list:
        return _untag_container(tag, body, depth)
    raise UnencodableValue("not an encoded value")


def _untag_text(tag: object, body: str) -> Any:
    if tag == "i" and len(body) <= MAX_INT_BITS // 4 + 2:
        return int(body, 16)
    if tag == "f":
        return float.fromhex(body)
    if tag == "s":
        return body
    if tag == "b":
        return bytes.fromhex(body)
    raise UnencodableValue("not an encoded value")


def _untag_container(tag: object, body: list[Any], depth: int) -> Any:
    if tag == "d":
        pairs = [(_untag(key, depth + 1), _untag(item, depth + 1)) for key, item in body]
        require_spread(key for key, _ in pairs)
        return dict(pairs)
    items = [_untag(item, depth + 1) for item in body]
    if tag in ("e", "z"):
        require_spread(items)
    if tag == "l":
        return items
    if tag == "t":
        return tuple(items)
    if tag == "e":
        return set(items)
    if tag == "z":
        return frozenset(items)
    raise UnencodableValue("not an encoded value")


def require_spread(members: Iterable[Hashable]) -> None:
    """Refuse members that were chosen to have one hash: a set of n of them would take n * n comparisons."""
    most = Counter(hash(member) for member in members).most_common(1)
    if most and most[0][1] > _MAX_SAME_HASH:
        raise UnencodableValue(f"{most[0][1]} members with the same hash")
