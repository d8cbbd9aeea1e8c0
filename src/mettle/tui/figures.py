"""Numbers for people: rewards, counts, durations, shares, bars and histograms of block characters.

Parts: `figure`, `whole`, `seconds`, `ago`, `percent`, `usd`, `between`, `bar`, `histogram`. Invariant: what is not
known is a dash, never a 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"
BAR, HALF_BAR = "━", "╸"
DASH = "-"


def figure(value: float | None, digits: int = 3) -> str:
    """A reward or a metric."""
    if value is None:
        return DASH
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.4g}"


def whole(value: float | None) -> str:
    """A count, with separators."""
    return DASH if value is None else f"{value:,.0f}"


def count(number: int, noun: str) -> str:
    """So many of something."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def short(value: float | None) -> str:
    """A count in at most five characters."""
    if value is None:
        return DASH
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "G")):
        if abs(value) < limit:
            scaled = value * 1e3 / limit
            return f"{scaled:.0f}{unit}" if not unit or scaled >= 99.5 else f"{scaled:.1f}{unit}"
    return f"{value:.0e}"


def seconds(value: float | None) -> str:
    """A duration."""
    if value is None:
        return DASH
    if value < 60:
        return f"{value:.1f} s" if value >= 0.1 or value == 0 else f"{value * 1000:.0f} ms"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def ago(then: float, now: float) -> str:
    """How long ago something was."""
    gone = max(0.0, now - then)
    for limit, unit, size in ((60, "s", 1), (3600, "min", 60), (86400, "h", 3600), (math.inf, "d", 86400)):
        if gone < limit:
            return f"{gone / size:.0f} {unit} ago"
    raise AssertionError("the last limit is infinite")


def percent(share: float | None) -> str:
    """A share of all."""
    return DASH if share is None else f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"


def usd(value: float | None) -> str:
    """What something cost."""
    return DASH if value is None else f"${value:,.2f}" if value >= 1 else f"${value:.4f}"


def between(interval: Sequence[float] | None) -> str:
    """An interval."""
    return "" if not interval else f"[{figure(interval[0])}, {figure(interval[1])}]"


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


def histogram(counts: Sequence[int], height: int) -> list[str]:
    """Columns of blocks, the top line first; a bin that is not empty is seen."""
    most = max(counts, default=0) or 1
    levels = [max(1, round(count / most * height * 8)) if count else 0 for count in counts]
    return [
        "".join(EIGHTHS[min(8, max(0, level - 8 * line))] for level in levels) for line in range(height - 1, -1, -1)
    ]


def sparkline(counts: Sequence[int]) -> str:
    """A histogram of one line."""
    return histogram(counts, 1)[0] if counts else ""
