"""The runs of a model on an environment: to open one, or to compare two.

Parts: `RunsScreen`. Invariant: the list and the preview beside it come from the metadata alone; no results are read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.widget import Widget

from mettle.evals.entries import OWN_KIND, EvaluationEntry
from mettle.tui.overview import Paragraphs
from mettle.tui.parts import Page
from mettle.tui.record_table import Cell, Column, RecordTable
from mettle.tui.screens.choices import ChoiceScreen
from mettle.wording import DASH, count, duration, format_interval, format_reward, number, one_line, percent, usd, whole


class RunsScreen(ChoiceScreen):
    """The runs of a model on an environment."""

    COLUMNS = (
        Column("mark", "", 1),
        Column("name", "run", min_width=10),
        Column("reward", "reward", 7, is_right=True),
        Column("interval", "95 %", 14, rank=2),
        Column("n", "n", 7, is_right=True),
        Column("errors", "errors", 6, is_right=True),
        Column("cost", "cost", 8, is_right=True, rank=1),
        Column("took", "took", 11, is_right=True, rank=2),
        Column("date", "date", 16, is_right=True, rank=1),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "mark", "Mark"),
        Binding("c", "compare", "Compare"),
    ]

    def __init__(self, env_id: str, model: str) -> None:
        super().__init__()
        self.env_id, self.model = env_id, model
        self.marked: list[str] = []
        self.page = Page(id="side")

    def body(self) -> Iterable[Widget]:
        yield Horizontal(self.table, self.page)

    def path(self) -> Sequence[str]:
        return (self.env_id, self.model)

    def all_items(self) -> list[EvaluationEntry]:
        return self.browser.catalog.runs(self.env_id, self.model)

    def name_of(self, item: EvaluationEntry) -> str:
        return item.name

    def cells_of(self, item: EvaluationEntry) -> Sequence[Cell]:
        number = self.marked.index(item.name) if item.name in self.marked else None
        errors = item.error_rate
        return (
            Cell("" if number is None else "AB"[number], "mark"),
            Cell(title_of(item), "bad" if item.problem else "strong"),
            Cell(format_reward(item.reward), "accent"),
            Cell(format_interval(item.interval), "dim"),
            Cell(_progress(item), "" if item.is_complete else "warn"),
            Cell(percent(errors) if errors else DASH, "bad" if errors else "dim"),
            Cell(usd(item.cost_usd)),
            Cell(duration(item.time_s), "dim"),
            Cell(time.strftime("%Y-%m-%d %H:%M", time.localtime(item.modified_at)), "dim"),
        )

    def summary(self) -> str:
        hint = "x marks two runs, c compares them" if len(self.items) > 1 else "enter opens it"
        return f"{count(len(self.items), 'run')}; {hint}"

    def on_record_table_moved(self, event: RecordTable.Moved) -> None:
        """Show what the metadata say."""
        self._preview()

    def fill(self) -> None:
        super().fill()
        self._preview()

    def on_record_table_chosen(self, event: RecordTable.Chosen) -> None:
        """Open the run."""
        item = self.items[event.row]
        if item.problem:
            self.browser.refuse(item.problem)
        else:
            self.browser.open_run(Path(item.name))

    def action_mark(self) -> None:
        """Mark a run for a comparison: the first is A, the second B."""
        item = self.chosen()
        if item is None:
            return
        name = item.name
        self.marked = (
            [kept for kept in self.marked if kept != name] if name in self.marked else [*self.marked, name][-2:]
        )
        self.table.refresh()

    def action_compare(self) -> None:
        """Compare the two that are marked; A is the one that was marked first."""
        paths = {item.name: Path(item.name) for item in self.all_items()}
        pair = [paths[name] for name in self.marked if name in paths]
        if len(pair) != 2:
            self.browser.refuse("mark two runs with x first: A is the one before, B the one after")
            return
        self.browser.open_comparison(pair[0], pair[1])

    def _preview(self) -> None:
        item = self.chosen()
        self.page.show(partial(_preview, item) if item is not None else lambda width: Content(""))


def title_of(entry: EvaluationEntry) -> str:
    """An evaluation by its folder, or by what it is of the run that it belongs to."""
    return entry.path.name if entry.kind == OWN_KIND else f"{entry.path.name}:{entry.eval_id} {entry.kind}"


def _progress(entry: EvaluationEntry) -> str:
    """How many rollouts there are, and of how many."""
    done, planned = entry.num_done, entry.num_planned
    if done is None or planned is None or done >= planned:
        return whole(planned if done is None else done)
    return f"{whole(done)} of {whole(planned)}"


def _preview(entry: EvaluationEntry, width: int) -> Content:
    """What the metadata of a run say."""
    page = Paragraphs(width)
    metadata = entry.metadata
    page.head(one_line(title_of(entry), 60), one_line(metadata.get("name") or "", 60))
    if entry.problem:
        page.line((one_line(entry.problem, 600), "$error"))
        return page.content()
    page.row("reward", format_reward(entry.reward), tone="bold")
    for title in ("pass_at_k", "pass_all_k", "avg_metrics"):
        values = metadata.get(title)
        if isinstance(values, dict) and values:
            page.head({"pass_at_k": "pass@k", "pass_all_k": "pass^k"}.get(title, "Metrics"))
            for name, value in values.items():
                page.row(one_line(name, 60), format_reward(number(value)))
    page.head("Settings")
    for name in ("num_examples", "rollouts_per_example", "base_url"):
        page.row(name.replace("_", " "), one_line(metadata.get(name, DASH), 200))
    for title in ("sampling_args", "env_args"):
        values = metadata.get(title)
        for name, value in values.items() if isinstance(values, dict) else ():
            if value not in (None, {}, []):
                page.row(one_line(name, 60), one_line(value, 200))
    return page.content()
