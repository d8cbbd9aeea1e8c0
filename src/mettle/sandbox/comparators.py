"""Is this output the expected one? Pure functions, run by the owner on data that the judged process sent.

Nothing here calls a method of a foreign object: outputs are bytes, and values were rebuilt from plain types.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from mettle.sandbox.verdicts import OutputRule, ValueRule

_REAL_NUMBER: Final = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?\Z")
_WHOLE_NUMBER: Final = re.compile(rb"[+-]?\d+\Z")


def outputs_match(output: bytes, expected: bytes, rule: OutputRule, tolerance: float) -> bool:
    """Compare what a program printed with what it should have."""
    if rule == "exact":
        return output == expected
    if rule == "trim":
        return _trimmed_lines(output) == _trimmed_lines(expected)
    words, expected_words = output.split(), expected.split()
    if rule == "tokens" or len(words) != len(expected_words):
        return words == expected_words
    return all(_words_match(word, wanted, tolerance) for word, wanted in zip(words, expected_words, strict=True))


def values_match(value: Any, expected: Any, rule: ValueRule, tolerance: float | None) -> bool:
    """Compare a returned value with the expected one, type by type, at every depth."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(values_match(item, wanted, rule, tolerance) for item, wanted in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        return _dicts_match(value, expected, rule, tolerance)
    if _is_number(expected) and _is_number(value):
        return _numbers_match(value, expected, rule, tolerance)
    if isinstance(expected, set | frozenset):
        return isinstance(value, set | frozenset) and _typed_members(value) == _typed_members(expected)
    return type(value) is type(expected) and bool(value == expected)


def _trimmed_lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _words_match(word: bytes, wanted: bytes, tolerance: float) -> bool:
    if word == wanted:
        return True
    if _WHOLE_NUMBER.match(wanted):
        return False  # a whole number is meant exactly, however large it is
    if not (_REAL_NUMBER.match(word) and _REAL_NUMBER.match(wanted)):
        return False
    return _close(float(word), float(wanted), tolerance)


def _close(value: float, wanted: float, tolerance: float) -> bool:
    return math.isfinite(value) and math.isclose(value, wanted, rel_tol=tolerance, abs_tol=tolerance)


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _numbers_match(value: float, expected: float, rule: ValueRule, tolerance: float | None) -> bool:
    if rule == "typed" and type(value) is not type(expected):
        return False
    if value == expected:
        return True
    if tolerance is None or (type(value) is int and type(expected) is int):
        return False
    try:
        return _close(float(value), float(expected), tolerance)
    except OverflowError:
        return False


def _dicts_match(value: Any, expected: dict[Any, Any], rule: ValueRule, tolerance: float | None) -> bool:
    if not isinstance(value, dict) or _typed_members(value) != _typed_members(expected):
        return False
    return all(values_match(value[key], wanted, rule, tolerance) for key, wanted in expected.items())


def _typed_members(items: Any) -> set[tuple[type, Any]]:
    return {(type(item), item) for item in items}
