"""The metrics of one run, read incrementally: only what stands after the newest step that is known.

The table's key is (name, step), so that names are found by skipping from one to the next and each name's news by one
look-up; the cost of a poll does not grow with the length of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mettle.storage.database import Database

NAMES = """
WITH RECURSIVE names(name) AS (
    SELECT min(name) FROM metrics
    UNION ALL
    SELECT (SELECT min(name) FROM metrics WHERE name > names.name) FROM names WHERE names.name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL
"""

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


def short(value: float | None) -> float | None:
    """A value with six significant digits: more is not seen, and it halves what is sent."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
