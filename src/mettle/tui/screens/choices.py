"""What is saved here: environments, the models of one, the runs of one model.

Parts: `EnvironmentsScreen`, `ModelsScreen`, `RunsScreen`. Each is a table that looks again every two seconds.
Invariants: the cursor stays with what it stood on when the list changes; a damaged evaluation is listed with the
reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.widget import Widget

from mettle.envs.evaluation.reader import EvaluationEntry
from mettle.tui.catalog import Group, cost_of, errors_of, mean_of, number, planned_of, saved_of, took_of
from mettle.tui.figures import DASH, ago, between, figure, percent, seconds, usd, whole
from mettle.tui.overview import Paragraphs
from mettle.tui.parts import BrowserScreen, Page, PromptBar
from mettle.tui.record_table import Cell, Column, RecordTable
from mettle.tui.text import one_line

LOOK_AGAIN_S = 2.0
NOTHING = "no evaluations in outputs/evals or environments/*/outputs/evals; mettle eval run ENV -m MODEL makes one"


class ChoiceScreen(BrowserScreen):
    """A table of things to choose from."""

    COLUMNS: ClassVar[tuple[Column, ...]] = ()
    BINDINGS: ClassVar[list[BindingType]] = [Binding("slash", "narrow", "Find")]

    def __init__(self) -> None:
        super().__init__()
        self.table = RecordTable(self.COLUMNS, id="main", empty="looking...")
        self.items: list[Any] = []
        self.wanted = ""

    def body(self) -> Iterable[Widget]:
        """The table."""
        yield self.table

    def on_mount(self) -> None:
        """Look, and go on looking."""
        super().on_mount()
        self.table.focus()
        self.fill()
        self.look()
        self.set_interval(LOOK_AGAIN_S, self.look)

    def on_screen_resume(self) -> None:
        """Show what changed meanwhile."""
        self.fill()

    @work(thread=True, exclusive=True, group="look")
    def look(self) -> None:
        """Read what is there, in a thread."""
        entries = self.browser.catalog.read()
        self.app.call_from_thread(self._take, entries)

    def all_items(self) -> list[Any]:
        """What there is to choose from."""
        raise NotImplementedError

    def name_of(self, item: Any) -> str:
        """What a thing is called."""
        raise NotImplementedError

    def cells_of(self, item: Any) -> Sequence[Cell]:
        """Its row."""
        raise NotImplementedError

    def fill(self) -> None:
        """Draw the table; the cursor stays with what it stood on."""
        before = self.chosen()
        wanted = self.wanted.casefold()
        self.items = [item for item in self.all_items() if wanted in self.name_of(item).casefold()]
        self.table.empty = f"nothing is called {self.wanted!r}" if wanted else NOTHING
        self.table.show(len(self.items), lambda row: self.cells_of(self.items[row]))
        names = [self.name_of(item) for item in self.items]
        if before is not None and self.name_of(before) in names:
            self.table.cursor = names.index(self.name_of(before))
        self.say(f"{len(self.items)} of {len(self.all_items())}" if wanted else self.summary())

    def summary(self) -> str:
        """The status line."""
        return f"{whole(len(self.items))} here"

    def chosen(self) -> Any | None:
        """What the cursor stands on."""
        return self.items[self.table.cursor] if self.table.cursor < len(self.items) else None

    def action_narrow(self) -> None:
        """Ask for a part of a name."""
        self.prompt.ask("narrow", "a part of the name; empty shows all", self.wanted)

    def on_prompt_bar_answered(self, event: PromptBar.Answered) -> None:
        """Show what has that in its name."""
        self.wanted = event.text.strip()
        self.prompt.close()
        self.fill()

    def _take(self, entries: list[EvaluationEntry]) -> None:
        if entries != self.browser.catalog.entries or not self.items:
            self.browser.catalog.entries = entries
            if self.is_current:
                self.fill()


class EnvironmentsScreen(ChoiceScreen):
    """The environments that were evaluated."""

    COLUMNS = (
        Column("name", "environment", min_width=16),
        Column("models", "models", 6, is_right=True, rank=1),
        Column("runs", "runs", 5, is_right=True),
        Column("best", "best", 7, is_right=True),
        Column("model", "by", rank=2, min_width=14),
        Column("last", "last", 10, is_right=True, rank=1),
    )

    def path(self) -> Sequence[str]:
        return ("evaluations",)

    def all_items(self) -> list[Group]:
        return self.browser.catalog.environments()

    def name_of(self, item: Group) -> str:
        return item.name

    def cells_of(self, item: Group) -> Sequence[Cell]:
        best = item.best
        return (
            Cell(item.name, "strong"), Cell(str(len(item.models))), Cell(str(len(item.entries))),
            Cell(figure(mean_of(best) if best else None), "accent"), Cell(best.model if best else DASH, "dim"),
            Cell(ago(item.entries[0].modified_at, time.time()), "dim"),
        )  # fmt: skip

    def summary(self) -> str:
        runs = len(self.browser.catalog.entries)
        return f"{whole(len(self.items))} environments, {whole(runs)} evaluations"

    def on_record_table_chosen(self, event: RecordTable.Chosen) -> None:
        """Show its models."""
        self.app.push_screen(ModelsScreen(self.items[event.row].name))


class ModelsScreen(ChoiceScreen):
    """The models that were evaluated on an environment."""

    COLUMNS = (
        Column("name", "model", min_width=16),
        Column("runs", "runs", 5, is_right=True),
        Column("best", "best", 7, is_right=True),
        Column("latest", "latest", 7, is_right=True),
        Column("errors", "errors", 7, is_right=True, rank=1),
        Column("last", "last", 10, is_right=True, rank=1),
    )

    def __init__(self, env_id: str) -> None:
        super().__init__()
        self.env_id = env_id

    def path(self) -> Sequence[str]:
        return (self.env_id,)

    def all_items(self) -> list[Group]:
        return self.browser.catalog.environment(self.env_id).models

    def name_of(self, item: Group) -> str:
        return item.name

    def cells_of(self, item: Group) -> Sequence[Cell]:
        best, latest = item.best, item.entries[0]
        errors = errors_of(latest)
        return (
            Cell(item.name, "strong"), Cell(str(len(item.entries))),
            Cell(figure(mean_of(best) if best else None), "accent"), Cell(figure(mean_of(latest))),
            Cell(percent(errors) if errors else DASH, "bad" if errors else "dim"),
            Cell(ago(latest.modified_at, time.time()), "dim"),
        )  # fmt: skip

    def summary(self) -> str:
        return f"{whole(len(self.items))} models on {one_line(self.env_id, 60)}"

    def on_record_table_chosen(self, event: RecordTable.Chosen) -> None:
        """Show its runs."""
        self.app.push_screen(RunsScreen(self.env_id, self.items[event.row].name))


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
        return str(item.path)

    def cells_of(self, item: EvaluationEntry) -> Sequence[Cell]:
        number = self.marked.index(str(item.path)) if str(item.path) in self.marked else None
        errors = errors_of(item)
        count, interval = saved_of(item)
        return (
            Cell("" if number is None else "AB"[number], "mark"),
            Cell(item.path.name, "bad" if item.problem else "strong"),
            Cell(figure(mean_of(item)), "accent"),
            Cell(between(interval), "dim"),
            Cell(whole(count or planned_of(item))),
            Cell(percent(errors) if errors else DASH, "bad" if errors else "dim"),
            Cell(usd(cost_of(item))),
            Cell(seconds(took_of(item)), "dim"),
            Cell(time.strftime("%Y-%m-%d %H:%M", time.localtime(item.modified_at)), "dim"),
        )

    def summary(self) -> str:
        hint = "x marks two runs, c compares them" if len(self.items) > 1 else "enter opens it"
        return f"{whole(len(self.items))} runs; {hint}"

    def on_record_table_moved(self, event: RecordTable.Moved) -> None:
        """Show what the metadata say."""
        self._preview()

    def fill(self) -> None:
        super().fill()
        self._preview()

    def on_record_table_chosen(self, event: RecordTable.Chosen) -> None:
        """Open the run."""
        from mettle.tui.screens.run import RunScreen

        item = self.items[event.row]
        if item.problem:
            self.browser.refuse(item.problem)
        else:
            self.app.push_screen(RunScreen(item.path))

    def action_mark(self) -> None:
        """Mark a run for a comparison: the first is A, the second B."""
        item = self.chosen()
        if item is None:
            return
        name = str(item.path)
        self.marked = (
            [kept for kept in self.marked if kept != name] if name in self.marked else [*self.marked, name][-2:]
        )
        self.table.refresh()

    def action_compare(self) -> None:
        """Compare the two that are marked, or the one under the cursor with the one before it."""
        from mettle.tui.screens.compare import CompareScreen

        paths = {str(item.path): item.path for item in self.all_items()}
        pair = [paths[name] for name in self.marked if name in paths]
        if len(pair) != 2:
            self.browser.refuse("mark two runs with x first: A is the one before, B the one after")
            return
        self.app.push_screen(CompareScreen(pair[0], pair[1]))

    def _preview(self) -> None:
        item = self.chosen()
        self.page.show(partial(_preview, item) if item is not None else lambda width: Content(""))


def _preview(entry: EvaluationEntry, width: int) -> Content:
    """What the metadata of a run say."""
    page = Paragraphs(width)
    metadata = entry.metadata
    page.head(one_line(entry.path.name, 60), one_line(metadata.get("name") or "", 60))
    if entry.problem:
        page.line((one_line(entry.problem, 600), "$error"))
        return page.content()
    page.row("reward", figure(mean_of(entry)), tone="bold")
    for title in ("pass_at_k", "pass_all_k", "avg_metrics"):
        values = metadata.get(title)
        if isinstance(values, dict) and values:
            page.head({"pass_at_k": "pass@k", "pass_all_k": "pass^k"}.get(title, "Metrics"))
            for name, value in values.items():
                page.row(one_line(name, 60), figure(number(value)))
    page.head("Settings")
    for name in ("num_examples", "rollouts_per_example", "base_url"):
        page.row(name.replace("_", " "), one_line(metadata.get(name, DASH), 200))
    for title in ("sampling_args", "env_args"):
        values = metadata.get(title)
        for name, value in values.items() if isinstance(values, dict) else ():
            if value not in (None, {}, []):
                page.row(one_line(name, 60), one_line(value, 200))
    return page.content()
