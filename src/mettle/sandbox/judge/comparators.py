"""Is this output the expected one? Pure functions, run by the owner on data that the judged process sent.

Nothing here calls a method of a foreign object: outputs are bytes, and values were rebuilt from plain types.
"""

from __future__ import annotations

import decimal
import math
import re
from typing import Any, Final

from mettle.sandbox.judge.verdicts import OutputRule, StdioTest, ValueRule

UNORDERED_RULES: Final[tuple[OutputRule, ...]] = ("trim", "lines", "tokens")
# One way to read each word, so that a long one that is no number is given up after one pass over it.
_REAL_NUMBER: Final = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?\Z")
_WHOLE_NUMBER: Final = re.compile(rb"[+-]?\d+\Z")


def outputs_match(output: bytes, expected: bytes, test: StdioTest) -> bool:
    """Compare what a program printed with what it should have, by the test's rule."""
    if test.ignore_case:
        output, expected = output.lower(), expected.lower()
    rule = test.compare
    if rule == "exact":
        return output == expected
    if rule == "decimals":
        return _decimal_lines_match(_stripped_lines(output), _stripped_lines(expected))
    if rule == "floats":
        return _float_words_match(output.split(), expected.split(), test)
    parts, wanted = _split(output, rule), _split(expected, rule)
    return sorted(parts) == sorted(wanted) if test.any_order else parts == wanted


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


def _split(text: bytes, rule: OutputRule) -> list[bytes]:
    if rule == "tokens":
        return text.split()
    return _stripped_lines(text) if rule == "lines" else _trimmed_lines(text)


def _trimmed_lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _stripped_lines(text: bytes) -> list[bytes]:
    return [line.strip() for line in text.strip().split(b"\n")]


def _decimal_lines_match(lines: list[bytes], wanted: list[bytes]) -> bool:
    return len(lines) == len(wanted) and all(
        line == other or _same_decimals(line.split(), other.split()) for line, other in zip(lines, wanted, strict=True)
    )


def _same_decimals(words: list[bytes], wanted: list[bytes]) -> bool:
    if len(words) != len(wanted) or not all(_REAL_NUMBER.match(word) for word in (*words, *wanted)):
        return False
    return all(_decimal(word) == _decimal(other) for word, other in zip(words, wanted, strict=True))


def _decimal(word: bytes) -> decimal.Decimal:
    return decimal.Decimal(word.decode("ascii"))


def _float_words_match(words: list[bytes], wanted: list[bytes], test: StdioTest) -> bool:
    absolute = test.tolerance if test.abs_tolerance is None else test.abs_tolerance
    relative = test.tolerance if test.rel_tolerance is None else test.rel_tolerance
    return len(words) == len(wanted) and all(
        _words_match(word, other, absolute, relative) for word, other in zip(words, wanted, strict=True)
    )


def _words_match(word: bytes, wanted: bytes, absolute: float, relative: float) -> bool:
    if word == wanted:
        return True
    if _WHOLE_NUMBER.match(wanted):
        return False  # a whole number is meant exactly, however large it is
    if not (_REAL_NUMBER.match(word) and _REAL_NUMBER.match(wanted)):
        return False
    return _close(float(word), float(wanted), absolute, relative)


def _close(value: float, wanted: float, absolute: float, relative: float) -> bool:
    """Within a difference, or a share of the expected value: the code's own value never widens what is allowed."""
    is_finite = math.isfinite(value) and math.isfinite(wanted)
    return is_finite and abs(value - wanted) <= max(absolute, relative * abs(wanted))


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
        return _close(float(value), float(expected), tolerance, tolerance)
    except OverflowError:
        return False


def _dicts_match(value: Any, expected: dict[Any, Any], rule: ValueRule, tolerance: float | None) -> bool:
    if not isinstance(value, dict) or _typed_members(value) != _typed_members(expected):
        return False
    return all(values_match(value[key], wanted, rule, tolerance) for key, wanted in expected.items())


def _typed_members(items: Any) -> set[tuple[type, Any]]:
    return {(type(item), item) for item in items}
