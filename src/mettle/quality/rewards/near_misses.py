"""Answers that look right and are not: another day, one off, two items swapped, another case, a letter changed.

Parts: `near_misses`. Each kind is made only where it says something else than the right answer: the day of a date, the
order of a list that is asked for in order, the case where two answers differ in nothing but case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from mettle.quality.answer_values import as_date, as_items, as_roman, as_time, as_version

_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(\.\d+)?%?")
_ROMAN = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"),
    (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)  # fmt: skip
_READERS: tuple[Callable[[str], Any], ...] = (as_date, as_time, as_version)
_LEAST_ROMAN = 2
_MAX_TYPED_CHARS = 60
"""A longer text is no date, time or version."""


def near_misses(
    text: str, *, is_label: bool = False, is_ordered: bool = False, has_case: bool = False
) -> dict[str, str]:
    """Wrong answers close to `text`, by kind. A label has no near miss by a letter: it would be no label.

    `is_ordered`: the order of a list is part of the answer. `has_case`: the case is.
    """
    stripped = text.strip()
    made: dict[str, str | None] = {}
    if not is_label or is_number(stripped):
        made["near-miss"] = _changed(stripped)
    made["other-day" if as_date(stripped) else "off-by-one"] = _one_off(stripped)
    if is_ordered:
        made["swapped-order"] = _swapped(stripped)
    if has_case:
        made["other-case"] = stripped.swapcase()
    return {kind: found for kind, found in made.items() if found is not None and found != stripped}


def is_number(text: str) -> bool:
    """Whether the text is a number and nothing else; `$` and `%` and thousands separators are allowed."""
    return _NUMBER.fullmatch(text.strip()) is not None


def number_of(text: str) -> float:
    """The number that `is_number` saw."""
    return float(re.sub(r"[$,%]", "", text.strip()))


def _one_off(text: str) -> str | None:
    """The day after, the minute after, the version after, the next Roman numeral, the last number of a name and one."""
    if len(text) > _MAX_TYPED_CHARS or is_number(text) or "\n" in text:
        return None
    if len(text) >= _LEAST_ROMAN and text.isupper() and (value := as_roman(text)):
        return roman(value + 1 if value < 3999 else value - 1)
    for read in _READERS:
        value_read = read(text)
        if value_read is not None:
            return next((other for other in _shifted(text) if read(other) not in (None, value_read)), None)
    return next(_shifted(text), None) if len(text.split()) <= 3 else None


def roman(value: int) -> str:
    """A number from 1 to 3999 as a Roman numeral."""
    said = ""
    for worth, letters in _ROMAN:
        said += letters * (value // worth)
        value %= worth
    return said


def _shifted(text: str) -> Iterator[str]:
    """The text with one of its numbers one up or one down; a day before a month, the last part of a version first."""
    runs = list(re.finditer(r"\d+", text))
    is_day_last = as_date(text) is not None and len(runs) >= 3 and len(runs[0][0]) == 4
    shorts = [run for run in runs if len(run[0]) <= 2] or runs
    order = [shorts[2 - 1]] if is_day_last and len(shorts) > 1 else []
    order += shorts if as_date(text) else shorts[::-1]
    for run in order:
        for step in (1, -1):
            value = int(run[0]) + step
            if value >= 0:
                yield f"{text[: run.start()]}{value:0{len(run[0])}d}{text[run.end() :]}"


def _swapped(text: str) -> str | None:
    """The list with its first two different neighbours in each other's place."""
    is_one = len(text) <= _MAX_TYPED_CHARS and any(read(text) is not None for read in _READERS)
    if is_one or as_items(text) is None or text.startswith(("[", "{")):
        return None
    pieces = _pieces(text)
    for at in range(0, len(pieces) - 2, 2):
        if pieces[at].casefold().strip() != pieces[at + 2].casefold().strip():
            pieces[at], pieces[at + 2] = pieces[at + 2], pieces[at]
            return "".join(pieces)
    return None


def _pieces(text: str) -> list[str]:
    """Items and what parts them, in turn; what numbers a line stays with its separator."""
    for separator in (
        r"( ?(?:->|=>|\u2192|>) ?)",
        r"(\n(?:\d+[.)] |[-*] )?)",
        "(; ?)",
        r"( ?\| ?)",
        "(, ?(?:and )?)",
        "( )",
    ):
        found = re.split(separator, text)
        if len(found) > 2:
            lead = re.match(r"(?:\d+[.)]|[-*]) ", found[0])
            return [found[0][lead.end() :] if lead else found[0], *found[1:]]
    return [text]


def _changed(text: str) -> str | None:
    if is_number(text):
        value = number_of(text)
        return str(int(value) + 1) if value == int(value) else f"{value * 1.1:.6g}"
    changed = _changed_json(text)
    if changed is not None:
        return changed
    lines = text.splitlines()
    if len(lines) > 1:
        return "\n".join(lines[:-1])
    if len(text) <= _MAX_TYPED_CHARS and any(read(text) is not None for read in _READERS):
        return None  # one off is the near miss that still is a date, a time, a version
    letters = [at for at, char in enumerate(text) if char.isalnum()]
    if len(letters) < 2:
        return None
    at = letters[len(letters) // 2]
    char = text[at]
    swapped = "e" if char.lower() != "e" else "a"
    if char.isdigit():
        swapped = str((int(char) + 1) % 10) if char.isdecimal() else "0"
    return text[:at] + (swapped.upper() if char.isupper() else swapped) + text[at + 1 :]


def _changed_json(text: str) -> str | None:
    """The same JSON object or list with its first value another."""
    if not text.startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, dict) and value:
        key = next(iter(value))
        value[key] = _another(value[key])
    elif isinstance(value, list) and value:
        value[0] = _another(value[0])
    else:
        return None
    return json.dumps(value, ensure_ascii=False)


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"not {value}"
