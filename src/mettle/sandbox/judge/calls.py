"""Function calls in languages other than Python: arguments as a driver reads them, and the value that it sends back.

A driver (`drivers/`) is a small program beside the solution, in its cell. Two forms are known:
    json   the call on standard input, the value on descriptor 3, as JSON with a tag for what JSON has no form for
    text   the call as words of the command, the value as the text that the function printed
The expected value is never encoded: what comes back is rebuilt from plain types and compared by the owner.
Invariant: nothing that a driver, or code in its process, writes makes anything but plain values or `UnencodableValue`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from mettle.errors import UserError
from mettle.sandbox.config import LanguageSpec
from mettle.sandbox.judge.comparators import values_match
from mettle.sandbox.judge.verdicts import CallTest
from mettle.sandbox.zygote.values import MAX_DEPTH, MAX_INT_BITS, UnencodableValue, require_spread

MAX_WORDS_BYTES: Final = 1 << 17
_SAFE_INT: Final = (1 << 53) - 1
_DRIVERS: Final = Path(__file__).with_name("drivers")
_NAMES: Final = {"json": re.compile(r"[^\W\d][\w$]*|[$][\w$]*"), "text": re.compile(r"[A-Za-z_][\w:-]*")}
# One way to read each text, so that a long one that is no number is given up after one pass over it.
_NUMBER: Final = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_MAX_NUMBER_CHARS: Final = 1000
_RETURNED: Final = b"."
_ODD_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def driver_source(spec: LanguageSpec) -> bytes:
    """The program that calls a function of a solution in this language."""
    return (_DRIVERS / f"{spec.name}{spec.extension}").read_bytes() if not spec.driver else spec.driver.encode()


def encode_call(spec: LanguageSpec, test: CallTest, number: int) -> tuple[bytes, tuple[str, ...]]:
    """Standard input and further words of the driver's command; UserError for what this language cannot be given."""
    if test.kwargs:
        raise UserError(f"test {number} passes arguments by name, which functions in {spec.name} do not take")
    if not _NAMES[spec.call_form].fullmatch(test.function):
        raise UserError(f"test {number} calls {test.function!r}, which is no name of a function in {spec.name}")
    try:
        if spec.call_form == "json":
            return json.dumps([test.function, [_to_json(arg, 0) for arg in test.args]]).encode(), ()
        words = tuple(_to_word(arg) for arg in test.args)
    except UnencodableValue as error:
        raise UserError(f"the arguments of test {number} cannot be sent to {spec.name}: {error}") from error
    if sum(len(word.encode(errors="surrogateescape")) for word in words) > MAX_WORDS_BYTES:
        raise UserError(f"the arguments of test {number} are over {MAX_WORDS_BYTES >> 10} kB, too long for a command")
    return b"", (test.function, *words)


def decode_value(spec: LanguageSpec, data: bytes) -> Any:
    """The value that a driver has sent; UnencodableValue for bytes that are none. They are not trusted."""
    if spec.call_form == "text":
        if not data.endswith(_RETURNED):
            raise UnencodableValue("the code ended before the function came back")
        return data[: -len(_RETURNED)].decode(errors="replace").rstrip("\n")
    try:
        return _from_json(json.loads(data), 0)
    except UnencodableValue:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise UnencodableValue(f"not an encoded value: {type(error).__name__}") from error


def returned_matches(spec: LanguageSpec, value: Any, test: CallTest) -> bool:
    """Compare as Python's are, but for what the language does not tell apart: 1 and 1.0, or text and anything."""
    if spec.call_form == "text":
        return _words_match(value, test.expected, test.tolerance)
    return values_match(value, test.expected, "numeric", test.tolerance)


def _words_match(printed: str, expected: Any, tolerance: float | None) -> bool:
    if isinstance(expected, list | tuple):
        words = printed.split()
        return len(words) == len(expected) and all(
            _words_match(word, item, tolerance) for word, item in zip(words, expected, strict=True)
        )
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        text = printed.strip()
        if len(text) > _MAX_NUMBER_CHARS or not (found := _NUMBER.fullmatch(text)):
            return False
        is_whole = found[1].isdigit() and not found[3]
        number = int(text) if is_whole else float(text)
        return values_match(number, expected, "numeric", tolerance)
    try:
        return printed == _to_word(expected).rstrip("\n")
    except UnencodableValue:
        return False


def _to_json(value: Any, depth: int) -> Any:
    kind = type(value)
    if depth > MAX_DEPTH:
        raise UnencodableValue(f"nested deeper than {MAX_DEPTH}")
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) <= _SAFE_INT else {"$int": format(value, "x")}
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is bytes:
        return {"$bytes": value.hex()}
    if kind in (list, tuple):
        return [_to_json(item, depth + 1) for item in value]
    if kind in (set, frozenset):
        return {"$set": [_to_json(item, depth + 1) for item in value]}
    if kind is dict:
        tag = "$object" if all(type(key) is str for key in value) else "$map"
        return {tag: [[_to_json(key, depth + 1), _to_json(item, depth + 1)] for key, item in value.items()]}
    raise UnencodableValue(f"a value of type {kind.__name__}")


def _from_json(data: Any, depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise UnencodableValue(f"nested deeper than {MAX_DEPTH}")
    if isinstance(data, list):
        return [_from_json(item, depth + 1) for item in data]
    if isinstance(data, float) and not math.isfinite(data):
        raise UnencodableValue("a number that JSON has no form for")
    if not isinstance(data, dict):
        return data
    [(tag, body)] = data.items()
    if tag == "$set":
        members = [_from_json(item, depth + 1) for item in body]
        require_spread(members)
        return set(members)
    if tag in ("$object", "$map"):
        pairs = [(_from_json(key, depth + 1), _from_json(item, depth + 1)) for key, item in body]
        require_spread(key for key, _ in pairs)
        return dict(pairs)
    return _TEXTS[tag](body)


def _read_int(body: str) -> int:
    if len(body) > MAX_INT_BITS // 4 + 2:
        raise UnencodableValue(f"an int of more than {MAX_INT_BITS} bits")
    return int(body, 16)


_TEXTS: Final[dict[str, Callable[[str], Any]]] = {
    "$int": _read_int,
    "$float": _ODD_FLOATS.__getitem__,
    "$bytes": bytes.fromhex,
}


def _to_word(value: Any) -> str:
    """A value as a word of a command; a list is its items with spaces between them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if "\0" in value:
            raise UnencodableValue("text with a NUL")
        return value
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Sequence) and not any(isinstance(item, list | tuple | bytes) for item in value):
        return " ".join(_to_word(item) for item in value)
    raise UnencodableValue(f"a value of type {type(value).__name__}; there are texts, numbers, and lists of them")
