"""What short answers mean: dates, times of day, versions, Roman numerals, lists in order, and names.

Parts: `as_date`, `as_time`, `as_version`, `as_roman`, `as_items`, `as_words`, `as_written`. Each reads a whole text,
and gives None (the last two: "") for one of another kind. The recipes put their source into the environments that are
made of data, so each stands by itself on the standard library. Invariant: two texts have the same value only when they
say the same; what reads a right answer written otherwise never reads a wrong one as right.
"""

from __future__ import annotations

import re
from datetime import datetime


def as_date(text: str) -> tuple[int, ...] | None:
    """The date that the text is, with its time where it has one; parts that it does not state are 0.

    Of `3/4/2024` the month comes first, of `3.4.2024` the day; where only one order is possible, that.
    """
    months = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
    named = r"(?P<m>jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
    days = r"(?P<d>\d{1,2})(?:st|nd|rd|th)?"
    year = r"(?P<y>\d{4})"
    clock = r"(?:(?:t|,? +| at )(?P<H>\d{1,2}):(?P<M>\d{2})(?::(?P<S>\d{2}))?(?:\.0+)?(?:z|\+00:00| ?utc)?)?"
    forms = (
        rf"{year}(?P<s>[-/.])(?P<m>\d{{1,2}})(?P=s)(?P<d>\d{{1,2}})",
        rf"(?P<a>\d{{1,2}})(?P<s>[-/.])(?P<b>\d{{1,2}})(?P=s){year}",
        rf"{named} {days}(?:,? {year})?",
        rf"{days}(?: of)?[ -]{named}(?:,?[ -]{year})?",
        rf"{named},? {year}",
    )
    said = " ".join(text.lower().split()).rstrip(".!") if len(text) <= 100 else ""
    said = re.sub(r"^(?:(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?,? +|the +|on +)+", "", said)
    match = next((found for form in forms if (found := re.fullmatch(form + clock, said))), None)
    if match is None:
        return None
    parts = {name: value for name, value in match.groupdict().items() if value is not None}
    if "a" in parts:
        first, second = int(parts["a"]), int(parts["b"])
        is_day_first = first > 12 or (parts["s"] == "." and second <= 12)
        parts["d"], parts["m"] = (first, second) if is_day_first else (second, first)
    month = parts.get("m", 0)
    month = months.index(month) + 1 if month in months else int(month)
    years, day, hour, minute, second = (int(parts.get(name, 0)) for name in "ydHMS")
    try:
        datetime(years or 2024, month, day or 1, hour, minute, second)
    except ValueError:
        return None
    return years, month, day, hour, minute, second


def as_time(text: str) -> tuple[int, int, int] | None:
    """The time of day that the text is, as hours, minutes and seconds."""
    said = " ".join(text.lower().split()).rstrip("!") if len(text) <= 100 else ""
    match = re.fullmatch(r"(?:at )?(\d{1,2})(?::(\d{2})(?::(\d{2}))?)? ?(am|pm|a\.m\.?|p\.m\.?)?\.?", said)
    if match is None or not (match[2] or match[4]):
        return None
    hours, minutes, seconds = int(match[1]), int(match[2] or 0), int(match[3] or 0)
    if match[4]:
        if not 1 <= hours <= 12:
            return None
        hours = hours % 12 + 12 * (match[4][0] == "p")
    return (hours, minutes, seconds) if hours < 24 and minutes < 60 and seconds < 60 else None


def as_version(text: str) -> tuple[tuple[int, ...], str] | None:
    """The version that the text is: its numbers, and what follows them. 1.10 is not 1.1."""
    suffix = r"((?:[-._+]?(?:alpha|beta|rc|dev|post|pre|a|b|c)\d*)?(?:[-._+][0-9a-z]+)*)"
    pattern = rf"(?:version )?v?(\d+(?:\.\d+)+){suffix}"
    match = re.fullmatch(pattern, " ".join(text.lower().split())) if len(text) <= 100 else None
    return (tuple(map(int, match[1].split("."))), match[2].strip("-._+")) if match else None


def as_roman(text: str) -> int | None:
    """The number that a Roman numeral is; digits are none."""
    said = text.strip().upper().rstrip(".")
    if not 0 < len(said) <= 15 or not re.fullmatch(r"M{0,3}(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})", said):
        return None
    values = [{"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}[letter] for letter in said]
    return sum(-value if value < after else value for value, after in zip(values, [*values[1:], 0], strict=True))


def as_items(text: str) -> tuple[str, ...] | None:
    """The items of a list, in order; None for a single one.

    They are parted by arrows, lines, semicolons, bars or commas, or by space where there are none of these.
    """
    said = "\n".join(" ".join(line.split()) for line in text.strip().removesuffix(".").splitlines() if line.strip())
    if said[:1] + said[-1:] in ("[]", "()", "{}"):
        said = said[1:-1]
    for separator in (" ?(?:->|=>|\u2192|>) ?", "\n", " ?; ?", r" ?\| ?", " ?, ?(?:and )?", " "):
        found = [item for item in re.split(separator, said) if item]
        if len(found) > 1:
            bare = (re.sub(r"^(?:[-*\u2022]|\(?\d{1,2}[.)])\s+", "", item).strip(" \t'\"`") for item in found)
            return tuple(" ".join(item.casefold().split()) for item in bare)
    return None


def as_words(text: str) -> str:
    """The text without what does not matter in a name: case, space, quotes around it, a stop at its end, `the`."""
    said = " ".join(text.casefold().split()).strip("'\"`").rstrip(".!").strip("'\"` ")
    return said.removeprefix("the ")


def as_written(text: str) -> str:
    """The text without space, quotes around it and a stop at its end; its case stays."""
    return " ".join(text.split()).strip("'\"`").rstrip(".!").strip("'\"` ")
