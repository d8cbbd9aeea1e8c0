"""How values are shown to people: figures, counts, durations, bytes, money, bars of block characters, printable text.

Parts: `number`, `figure`, `format_reward`, `format_interval`, `between`, `whole`, `count`, `share_of`, `compact`,
`percent`, `duration`, `ago`, `num_bytes`, `usd`; `bar`, `bins`, `histogram`, `sparkline`; `printable`, `one_line`.
Invariants: what is not known is a dash, never a 0; what `printable` returns holds no control, no half of a surrogate
pair, no mark that changes the direction of writing, and nothing that takes up no cell apart from a few accents.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

DASH = "-"
EIGHTHS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
BAR, HALF_BAR = "\u2501", "\u2578"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_ACCENTS = 4


def number(value: Any) -> float | None:
    """A figure that can be shown, of data that may hold anything; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        return None
    return float(value)


def format_reward(value: float | None, digits: int = 3) -> str:
    """A reward or a metric: three decimals, so that the same number reads the same everywhere."""
    if value is None:
        return DASH
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.4g}"


def format_interval(bounds: Sequence[float | None] | None) -> str:
    """An interval; empty where there is none."""
    if not bounds or bounds[0] is None or bounds[1] is None:
        return ""
    return f"[{format_reward(bounds[0])}, {format_reward(bounds[1])}]"


def between(bounds: Sequence[float] | None) -> str:
    """An interval in words: "0.012 to 0.988"."""
    return f"{format_reward(bounds[0])} to {format_reward(bounds[1])}" if bounds else ""


def figure(value: Any) -> str:
    """A cell of a table: a short number, a dash for what is not there."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def whole(value: float | None) -> str:
    """A count, with thousands apart."""
    return DASH if value is None else f"{value:,.0f}"


def count(number: int, noun: str) -> str:
    """So many of something."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def share_of(number: int, total: int | None, noun: str) -> str:
    """How much of what is meant to be there: "130 of 16,000 rollouts", "40 rollouts" when that is all."""
    return f"{number:,} of {total:,} {noun}s" if total is not None and number < total else count(number, noun)


def compact(value: float | None) -> str:
    """A count in at most five characters: 1,804 as 1.8k."""
    if value is None:
        return DASH
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "G")):
        if abs(value) < limit:
            scaled = value * 1e3 / limit
            return f"{scaled:.0f}{unit}" if not unit or scaled >= 99.5 else f"{scaled:.1f}{unit}"
    return f"{value:.0e}"


def percent(share: float | None) -> str:
    """A share of all."""
    return DASH if share is None else f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"


def duration(seconds: float | None) -> str:
    """Seconds as 340 ms, 3.2 s, 41 s, 3 min 12 s, 2 h 05 min or 3 d 4 h."""
    if seconds is None:
        return DASH
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds >= 0.1 or seconds == 0 else f"{seconds * 1000:.0f} ms"
    gone = round(seconds)
    if gone < 60:
        return f"{gone} s"
    if gone < 3600:
        return f"{gone // 60} min {gone % 60:02} s"
    if gone < 86400:
        return f"{gone // 3600} h {gone % 3600 // 60:02} min"
    return f"{gone // 86400} d {gone % 86400 // 3600} h"


def ago(then: float, now: float) -> str:
    """How long ago something was."""
    gone = max(0.0, now - then)
    for limit, unit, size in ((60, "s", 1), (3600, "min", 60), (86400, "h", 3600), (math.inf, "d", 86400)):
        if gone < limit:
            return f"{gone / size:.0f} {unit} ago"
    raise AssertionError("the last limit is infinite")


def num_bytes(number: float | None) -> str:
    """Bytes in units of 1,024."""
    if number is None:
        return DASH
    for limit, unit in ((2**10, "B"), (2**20, "KiB"), (2**30, "MiB"), (2**40, "GiB"), (math.inf, "TiB")):
        if number < limit:
            scaled = number / {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
            return f"{scaled:.0f} {unit}" if unit == "B" or scaled >= 99.5 else f"{scaled:.1f} {unit}"
    raise AssertionError("the last limit is infinite")


def usd(value: float | None) -> str:
    """What something cost; more digits for less money."""
    if value is None:
        return DASH
    return f"${value:,.2f}" if value >= 1 or value == 0 else f"${value:.3g}"


def bar(share: float, width: int) -> str:
    """A horizontal bar in half cells; anything above nothing is seen."""
    halves = min(2 * width, max(1 if share > 0 else 0, round(share * width * 2)))
    return (BAR * (halves // 2) + HALF_BAR * (halves % 2)).ljust(width)


def bins(values: Sequence[float], num_bins: int) -> tuple[float, float, list[int]]:
    """The range that equal bins cover, at least 0 to 1, and how many values are in each of them."""
    low, high = min(0.0, *values), max(1.0, *values)
    counts = [0] * num_bins
    for value in values:
        counts[min(num_bins - 1, int((value - low) / (high - low) * num_bins))] += 1
    return low, high, counts


def histogram(counts: Sequence[int], height: int = 1) -> list[str]:
    """Columns of blocks, the top line first; a bin that is not empty is seen."""
    most = max(counts, default=0) or 1
    levels = [max(1, round(number / most * height * 8)) if number else 0 for number in counts]
    return [
        "".join(EIGHTHS[min(8, max(0, level - 8 * line))] for level in levels) for line in range(height - 1, -1, -1)
    ]


def sparkline(values: Sequence[float], width: int, *, low: float = 0.0, high: float = 1.0) -> str:
    """A history as a line of block characters, `width` columns, between `low` and `high` (widened to fit)."""
    if not values:
        return ""
    low, high = min(low, *values), max(high, *values)
    per_column = max(1, -(-len(values) // width))
    columns = [values[i : i + per_column] for i in range(0, len(values), per_column)]
    return "".join(EIGHTHS[1 + round(7 * (sum(c) / len(c) - low) / (high - low or 1.0))] for c in columns)


_PICTURES = {code: chr(0x2400 + code) for code in range(32)} | {127: "\N{SYMBOL FOR DELETE}"}
_SPACES = {0x2028: "\n", 0x2029: "\n", 0xA0: " ", 0x202F: " ", 0x3164: " ", 0xAD: None}
_INVISIBLE = (
    *range(0x80, 0xA0), 0x61C, 0x115F, 0x1160, 0x180E, *range(0x200B, 0x2010), *range(0x202A, 0x202F),
    *range(0x2060, 0x2070), 0xFEFF, 0xFFA0, *range(0xFFF0, 0xFFFC), *range(0xE0000, 0xE0080),
)  # fmt: skip
_DROPPED = (0x200D, *range(0xFE00, 0xFE10), *range(0x1F3FB, 0x1F400), *range(0xE0100, 0xE01F0))
_TABLE: dict[int, str | None] = {
    **_PICTURES,
    **dict.fromkeys(_INVISIBLE, REPLACEMENT),
    **_SPACES,
    # Joiners and variants only choose between pictures, and terminals disagree about the width of the result.
    **dict.fromkeys(_DROPPED),
    9: "    ",
    10: "\n",
}
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_ACCENT = r"[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
_ACCENTS = re.compile(f"({_ACCENT}{{{MAX_ACCENTS}}}){_ACCENT}+")
_PLAIN = re.compile(r"[ -~\n]*\Z")


def printable(text: str) -> str:
    """`text` as it can be drawn: newlines stay, a control shows as its picture, nothing drives the terminal."""
    if _PLAIN.match(text):
        return text
    text = text.replace("\r\n", "\n")
    if not text.isascii():
        text = _ACCENTS.sub(r"\1", _SURROGATES.sub(REPLACEMENT, text))
    return text.translate(_TABLE)


def one_line(value: object, limit: int = 500) -> str:
    """A short text on one line."""
    text = value if isinstance(value, str) else str(value)
    return " ".join(printable(text[: 4 * limit]).split())[:limit]
