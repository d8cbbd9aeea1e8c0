"""Runs beside each other: headlines, curves over one axis of steps, and the settings in which they differ.

Parts: `ComparedRun`, `compare_runs`, `overlay`, `differing_settings`. Invariant: a setting is shown when two runs don't
have it alike, also when one of them does not have it at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from mettle.hub.metrics import MAX_VALUES, thin
from mettle.hub.models import RunSummary
from mettle.hub.provenance import flatten, shown_value
from mettle.hub.reader import RunReader
from mettle.hub.series import CHARTS, REWARD, Chart, Series, columns_after
from mettle.hub.summary import summarise

TONES = ("ember", "steel", "moss", "plum", "sand", "faint")
MAX_RUNS = len(TONES)
DRAWN = {chart.id: chart.series[-1 if chart.id == "pass_at_k" else 0].key for chart in (REWARD, *CHARTS)}
"""What is drawn of each chart of the run page when it has several runs: one of its series."""
MAX_SETTINGS = 400


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of them. `settings` are the values of its config by dotted key."""

    name: str
    title: str
    tone: str
    summary: RunSummary
    steps: list[int]
    columns: dict[str, list[float | None]]
    settings: dict[str, str]


@dataclass(frozen=True, slots=True)
class DifferingSetting:
    """A setting that the runs do not have alike; None where a run does not have it."""

    key: str
    values: list[str | None]


def compare_runs(readers: Sequence[RunReader]) -> list[ComparedRun]:
    """Each as it stands now; at most `MAX_RUNS`, which is for the caller to see to."""
    return [_compared(reader, tone, len(readers)) for reader, tone in zip(readers, TONES, strict=False)]


def _compared(reader: RunReader, tone: str, num_runs: int) -> ComparedRun:
    with reader.lock:
        summary = summarise(reader)
        steps, columns = columns_after(reader.steps, reader.metrics, -1)
        settings = {key: shown_value(value) for key, value in flatten(reader.config)}
    wanted = {key: columns[key] for key in DRAWN.values()}
    steps, wanted = thin(steps, wanted, most_values=MAX_VALUES // num_runs)
    return ComparedRun(reader.run_dir.name, reader.title, tone, summary, steps, wanted, settings)


def overlay(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """The charts that have values of at least one run; each has a line a run, whose key is `COLUMN:NUMBER`."""
    found = []
    for chart in (REWARD, *CHARTS):
        key = DRAWN[chart.id]
        if any(value is not None for run in runs for value in run.columns[key]):
            lines = tuple(Series(f"{key}:{number}", run.title, run.tone) for number, run in enumerate(runs))
            found.append(asdict(_line_chart(chart, lines)) | {"key": key})
    return found


def _line_chart(chart: Chart, lines: tuple[Series, ...]) -> Chart:
    of = next(series.label for series in chart.series if series.key == DRAWN[chart.id])
    title = chart.title if chart.title.lower() == of.lower() or len(chart.series) == 1 else f"{chart.title}: {of}"
    return replace(chart, title=title, series=lines, band=None)


def differing_settings(runs: Sequence[Mapping[str, str]]) -> list[DifferingSetting]:
    """In the order in which they stand in the first run that has them; at most `MAX_SETTINGS`."""
    keys = dict.fromkeys(key for settings in runs for key in settings)
    rows = (DifferingSetting(key, [settings.get(key) for settings in runs]) for key in keys)
    return list(islice((row for row in rows if len(set(row.values)) > 1), MAX_SETTINGS))
