"""The metrics of one run, read incrementally: only what stands after the newest step that is known.

The table's key is (name, step), so that names are found by skipping from one to the next and each name's news by one
look-up; the cost of a poll does not grow with the length of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from mettle.storage.database import Database

NAMES = """
WITH RECURSIVE names(name) AS (
    SELECT min(name) FROM metrics
    UNION ALL
    SELECT (SELECT min(name) FROM metrics WHERE name > names.name) FROM names WHERE names.name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL
"""

MAX_VALUES = 3600
"""In all columns of a page together: at six significant digits less than 50 kB of JSON."""
LEAST_STEPS = 120
"""A chart with fewer than these shows no shape, however many charts there are."""
OVERLAP_STEPS = 2
"""Steps read again at each refresh: a replay or a second writer may have changed the newest values."""


class MetricTable:
    """Metric name to {step: value}."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.columns: dict[str, dict[int, float]] = {}

    def reset(self) -> None:
        """Forget everything, so that the next `refresh` reads it anew."""
        self.columns = {}

    def refresh(self) -> None:
        """Read what has been added."""
        for name in [row[0] for row in self._database.rows(NAMES)]:
            column = self.columns.setdefault(name, {})
            newest = next(reversed(column)) if column else -(2**60)
            rows = self._database.rows(
                "SELECT step, value FROM metrics WHERE name = ? AND step > ? ORDER BY step",
                (name, newest - OVERLAP_STEPS),
            )
            for row in rows:
                column[row["step"]] = row["value"]

    @property
    def names(self) -> list[str]:
        """The metrics there are, in alphabetical order."""
        return list(self.columns)

    def find(self, candidates: Sequence[str]) -> str | None:
        """The first of `candidates` that has been recorded."""
        return next((name for name in candidates if name in self.columns), None)

    def newest(self, candidates: Sequence[str]) -> float | None:
        """The newest value of the first of `candidates` that has been recorded."""
        name = self.find(candidates)
        column = self.columns[name] if name else {}
        return column[next(reversed(column))] if column else None

    def after(self, name: str, step: int) -> list[tuple[int, float]]:
        """(step, value) of a metric after a step."""
        return [(at, value) for at, value in self.columns.get(name, {}).items() if at > step]


def align(
    series: Iterable[tuple[str, Sequence[tuple[int, float]]]],
) -> tuple[list[int], dict[str, list[float | None]]]:
    """Several (name, [(step, value)]) as columns over one axis; None where a series has no value."""
    named = list(series)
    steps = sorted({step for _, points in named for step, _ in points})
    columns: dict[str, list[float | None]] = {}
    for name, points in named:
        values = dict(points)
        columns[name] = [short(values.get(step)) for step in steps]
    return steps, columns


def thin(
    steps: list[int], columns: dict[str, list[float | None]], *, most_values: int = MAX_VALUES
) -> tuple[list[int], dict[str, list[float | None]]]:
    """Columns that a chart can show as well: `most_values` values with the steps in all, but `LEAST_STEPS` steps.

    The newest quarter of the steps stays as it is. What is older goes into buckets of steps, and of each bucket a
    column keeps its least and its greatest value, in their order, at the bucket's first and last step: a spike of a
    single step is still seen, and stands at most one bucket beside its place.
    """
    most = max(LEAST_STEPS, most_values // (len(columns) + 1))
    if len(steps) <= most:
        return steps, columns
    newest = most // 4
    num_old, num_buckets = len(steps) - newest, (most - newest) // 2
    edges = [num_old * i // num_buckets for i in range(num_buckets + 1)]
    spans = list(pairwise(edges))
    thinned = {
        name: [value for low, high in spans for value in _extremes(column[low:high])] + column[num_old:]
        for name, column in columns.items()
    }
    return [step for low, high in spans for step in (steps[low], steps[high - 1])] + steps[num_old:], thinned


def _extremes(values: list[float | None]) -> tuple[float | None, float | None]:
    """The least and the greatest, in the order in which they stand."""
    known = [value for value in values if value is not None]
    if not known:
        return None, None
    least, greatest = min(known), max(known)
    return (least, greatest) if known.index(least) <= known.index(greatest) else (greatest, least)


def short(value: float | None) -> float | None:
    """A value with six significant digits: more is not seen, and it halves what is sent."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
