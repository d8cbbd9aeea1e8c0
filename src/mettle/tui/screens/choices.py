"""What is saved here: environments, and the models of one.

Parts: `EnvironmentsScreen`, `ModelsScreen`, and what they have in common with the list of runs: `ChoiceScreen`, a table
that looks again every two seconds. Invariants: the cursor stays with what it stood on when the list changes; a damaged
evaluation is listed with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.widget import Widget

from mettle.evals.entries import EvaluationEntry
from mettle.tui.catalog import Group
from mettle.tui.parts import BrowserScreen, PromptBar
from mettle.tui.record_table import Cell, Column, RecordTable
from mettle.wording import DASH, ago, count, format_reward, one_line, percent, whole

LOOK_AGAIN_S = 2.0
NOTHING = "no evaluations in outputs/evals, environments/*/outputs/evals or runs: mettle eval run ENV -m MODEL"


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
            Cell(format_reward(best.reward if best else None), "accent"), Cell(best.model if best else DASH, "dim"),
            Cell(ago(item.entries[0].modified_at, time.time()), "dim"),
        )  # fmt: skip

    def summary(self) -> str:
        runs = len(self.browser.catalog.entries)
        return f"{count(len(self.items), 'environment')}, {count(runs, 'evaluation')}"

    def on_record_table_chosen(self, event: RecordTable.Chosen) -> None:
        """Show its models."""
        self.browser.open_models(self.items[event.row].name)


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
        errors = latest.error_rate
        return (
            Cell(item.name, "strong"), Cell(str(len(item.entries))),
            Cell(format_reward(best.reward if best else None), "accent"), Cell(format_reward(latest.reward)),
            Cell(percent(errors) if errors else DASH, "bad" if errors else "dim"),
            Cell(ago(latest.modified_at, time.time()), "dim"),
        )  # fmt: skip

    def summary(self) -> str:
        return f"{count(len(self.items), 'model')} on {one_line(self.env_id, 60)}"

    def on_record_table_chosen(self, event: RecordTable.Chosen) -> None:
        """Show its runs."""
        self.browser.open_runs(self.env_id, self.items[event.row].name)
