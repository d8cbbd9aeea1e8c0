"""Does anything grow? The slope of each quantity over the samples at rest, robust against single odd ones.

The first third is warm-up and is not judged. Over the rest, the slope is Theil and Sen's: the median of the slopes
between all pairs of samples, which up to 29% of wild samples do not move. Growth is that slope times the time judged;
it is a failure where it, or the step from the first quarter's median to the last one's, is more than `LIMITS` allows: a
leak of a single thing has no slope. Counts are exact at rest, so they may not grow by one; memory may by what an
allocator keeps for itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

WARM_UP = 1 / 3
_MIN_SAMPLES = 4
_COUNT_LIMIT = 0.9
# Quantities that may grow by more than a count may, and by how much over the time judged.
LIMITS: Mapping[str, float] = {
    "threads of the owner": 3.0,  # asyncio's executor keeps up to four more than there are cores
    "memory of the owner, MB": 4.0,
    "memory of the templates, MB": 1.0,
    "memory of cells and machines, MB": 4.0,
    "memory of all, MB": 6.0,
    "resident memory of all, MB": 20.0,
    "objects of the owner, thousands": 4.0,  # the soak's own samples are about two of them
}


class Growth(NamedTuple):
    """One quantity's verdict."""

    name: str
    first: float  # medians of the first and the last quarter of what is judged
    last: float
    growth: float
    limit: float

    @property
    def is_growing(self) -> bool:
        return max(self.growth, self.last - self.first) > self.limit


def judge_samples(samples: Sequence[tuple[float, Mapping[str, float]]]) -> list[Growth]:
    """A verdict for each quantity. Samples are (seconds since the start, quantities), taken at rest."""
    judged = after_warm_up(samples)
    if len(judged) < _MIN_SAMPLES:
        raise ValueError(f"{len(judged)} samples at rest after the warm-up are too few to judge; take at least 4")
    span_s, quarter = judged[-1][0] - judged[0][0], max(1, len(judged) // 4)
    verdicts = []
    for name in judged[0][1]:
        points = [(at_s, values[name]) for at_s, values in judged]
        first, last = (statistics.median(value for _, value in part) for part in (points[:quarter], points[-quarter:]))
        verdicts.append(Growth(name, first, last, slope(points) * span_s, LIMITS.get(name, _COUNT_LIMIT)))
    return verdicts


def after_warm_up(
    samples: Sequence[tuple[float, Mapping[str, float]]],
) -> list[tuple[float, Mapping[str, float]]]:
    """The samples that are judged."""
    if not samples:
        return []
    begin_s, end_s = samples[0][0], samples[-1][0]
    return [sample for sample in samples if sample[0] >= begin_s + (end_s - begin_s) * WARM_UP]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil and Sen's: the median of the slopes between all pairs (units a second)."""
    slopes = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 > x1]
    return statistics.median(slopes) if slopes else 0.0


def table(verdicts: Sequence[Growth]) -> list[str]:
    """The verdicts as lines of text."""
    lines = [f"{'at rest':36}{'first':>10}{'last':>10}{'growth':>10}{'limit':>8}"]
    for one in verdicts:
        figures = f"{one.first:10.1f}{one.last:10.1f}{one.growth:+10.2f}{one.limit:8.1f}"
        lines.append(f"{one.name:36}{figures}{'  GROWS' if one.is_growing else ''}")
    return lines
