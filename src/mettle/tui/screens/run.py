"""One evaluation: its figures, and its rollouts to sort, filter and search.

Parts: `RunScreen`. Reading and counting run in threads, as searching does (`scanning`); an evaluation that is still
written to is read on every second. Invariant: whatever is going on, keys are answered at once and the cursor stays on
its rollout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from mettle.errors import MettleError, UserError
from mettle.evals.reader import EvaluationReader
from mettle.tui.filters import parse_filter
from mettle.tui.opened import OpenRun
from mettle.tui.overview import headline, overview
from mettle.tui.parts import Page, PromptBar
from mettle.tui.record_table import RecordTable
from mettle.tui.screens.rows import columns_of, row_of
from mettle.tui.screens.scanning import ScanningScreen
from mettle.tui.search import Needle
from mettle.tui.selection import SORTS
from mettle.wording import count, whole

READ_ON_S = 1.0
FILTER_HINT = 'reward<0.5  error  stop:max_turns  task:12  text:"foo"  !truncated; ? tells more; empty shows all'


class RunScreen(ScanningScreen):
    """The rollouts of an evaluation, and what they come to."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "filter", "Filter"),
        Binding("slash", "search", "Search"),
        Binding("n", "next_match(1)", "Next match", show=False),
        Binding("N", "next_match(-1)", "Previous match", show=False),
        Binding("s", "sort", "Sort"),
        Binding("S", "turn_round", "Turn the order round", show=False),
        Binding("t", "task", "Task"),
        Binding("o", "overview", "Overview"),
        Binding("e", "errors", "Only errors, or all", show=False),
        Binding("F", "follow", "Follow what comes in, or not", show=False),
    ]

    def __init__(self, path: Path, *, rollout: int | None = None) -> None:
        super().__init__()
        self.folder = path
        self.run: OpenRun | None = None
        self.table = RecordTable(columns_of(()), id="main", empty="reading...")
        self.page = Page(id="side")
        self.headline = Static(markup=False, id="head")
        self.is_following = False
        self._first = rollout

    def body(self) -> Iterable[Widget]:
        """The headline, the rollouts, the overview."""
        yield self.headline
        yield Horizontal(self.table, self.page)

    def path(self) -> Sequence[str]:
        """Environment, model, run."""
        if self.run is None:
            return (self.folder.name,)
        entry = self.run.reader.entry
        return (entry.env_id, entry.model, self.run.name)

    def state(self) -> str:
        """How far it is."""
        return self.run.progress() if self.run is not None else ""

    def on_mount(self) -> None:
        """Read it."""
        super().on_mount()
        self.table.focus()
        self.read()

    @work(thread=True, exclusive=True, group="read")
    def read(self) -> None:
        """Open the evaluation."""
        try:
            run = OpenRun(self.folder)
        except MettleError as error:
            self.app.call_from_thread(self._give_up, str(error))
            return
        self.app.call_from_thread(self._take, run)

    @work(thread=True, exclusive=True, group="read")
    def read_on(self) -> None:
        """Take in what was added."""
        run = self.run
        if run is None:
            return
        before = len(run.reader)
        try:
            is_grown = run.refresh()
        except MettleError as error:
            self.app.call_from_thread(self.browser.refuse, str(error))
            return
        self.app.call_from_thread(self._take_more, before if is_grown else None)

    def show_rows(self, keep: int | None = None) -> None:
        """Arrange and draw the rollouts; the cursor stays on rollout `keep`, or on the one it is on."""
        run = self.run
        if run is None:
            return
        keep = self.index() if keep is None else keep
        run.selection.arrange()
        self.table.sorted_by = (run.selection.sort, run.selection.is_descending)
        self.table.empty = "no rollout is like that" if run.selection.filter.source else "no rollouts yet"
        self.table.show(len(run.selection), self._cells)
        place = run.selection.place_of(keep) if keep is not None else None
        if place is not None:
            self.table.cursor = place
        self.say_where()

    def index(self) -> int | None:
        """The rollout that the cursor is on."""
        order = self.run.selection.order if self.run is not None else []
        return order[self.table.cursor] if self.table.cursor < len(order) else None

    def go_to(self, index: int) -> None:
        """Put the cursor on a rollout."""
        place = self.run.selection.place_of(index) if self.run is not None else None
        if place is not None:
            self.table.cursor = place

    def on_record_table_chosen(self, event: RecordTable.Chosen) -> None:
        """Open a rollout."""
        if self.run is not None and event.row < len(self.run.selection):
            self._open(self.run.selection.order[event.row])

    def on_record_table_moved(self, event: RecordTable.Moved) -> None:
        """Say where one is."""
        self.say_where()

    def on_record_table_head_clicked(self, event: RecordTable.HeadClicked) -> None:
        """Sort by that column."""
        self._sort(event.key)

    def on_prompt_bar_answered(self, event: PromptBar.Answered) -> None:
        """Filter or search."""
        if event.purpose == "filter":
            self.apply_filter(event.text)
        else:
            self.prompt.close()
            self.search(event.text)

    def apply_filter(self, source: str) -> None:
        """Show what is like `source`; what is wrong with it is said where it was typed."""
        run = self.run
        if run is None:
            return
        try:
            wanted = parse_filter(source, run.metrics, run.reader.pass_rule)
        except UserError as error:
            self.prompt.refuse(str(error))
            return
        self.prompt.close()
        self.workers.cancel_group(self, "filter")
        run.selection.filter = wanted
        run.selection.holds_text = set() if wanted.texts else None
        self.show_rows()
        if wanted.texts:
            self.scan_filter(wanted, range(len(run.reader)))

    def search(self, text: str) -> None:
        """Look for a text in what is shown; the cursor goes to the first place from where it is."""
        run = self.run
        if run is None:
            return
        self.workers.cancel_group(self, "search")
        run.found, run.looked_at = set(), None
        run.needle = Needle(text) if text else None
        self.table.refresh()
        self.say_where()
        if run.needle is not None:
            here = self.table.cursor
            order = run.selection.order
            self.scan_search(run.needle, order[here:] + order[:here])

    def action_filter(self) -> None:
        """Ask what to show."""
        if self.run is not None:
            self.prompt.ask("filter", FILTER_HINT, self.run.selection.filter.source)

    def action_search(self) -> None:
        """Ask what to look for."""
        if self.run is not None:
            text = self.run.needle.text if self.run.needle else ""
            self.prompt.ask(
                "search", "a text in conversations, answers, info or errors; n and N go on; empty ends it", text
            )

    def action_next_match(self, step: int) -> None:
        """Go to the next rollout that holds what was looked for."""
        here = self.index()
        found = self.run.next_found(here, step) if self.run is not None and here is not None else None
        if found is not None:
            self.go_to(found)

    def action_sort(self) -> None:
        """Sort by the next figure."""
        if self.run is not None:
            names = [*SORTS, *self.run.metrics]
            self._sort(names[(names.index(self.run.selection.sort) + 1) % len(names)])

    def action_turn_round(self) -> None:
        """Turn the order round."""
        if self.run is not None:
            self._sort(self.run.selection.sort)

    def action_errors(self) -> None:
        """Show the rollouts that failed, or all."""
        if self.run is not None:
            self.apply_filter("" if self.run.selection.filter.source == "error" else "error")

    def action_follow(self) -> None:
        """Stay with the newest rollout while it runs, or stop to."""
        self.is_following = not self.is_following
        if self.is_following:
            self.table.action_jump(-1)
        self.say_where()

    def action_overview(self) -> None:
        """Show or hide the overview."""
        self.toggle_side()
        (self.page if self.has_class("-side") and not self.is_wide else self.table).focus()

    def action_task(self) -> None:
        """Show the rollouts of the same task."""
        index = self.index()
        if self.run is not None and index is not None:
            self.browser.open_task(self.run, index)

    def _open(self, index: int) -> None:
        run = self.run
        if run is not None:
            self.browser.open_rollout(run, index, lambda: run.selection.order, self.go_to)

    def _give_up(self, why: str) -> None:
        self.table.empty = why
        self.table.show(0)
        self.browser.refuse(why)

    def _take(self, run: OpenRun) -> None:
        self.run = run
        self.table.show_columns(columns_of(run.metrics))
        self._draw_figures()
        self.show_rows()
        self.set_interval(READ_ON_S, self.read_on)
        if self._first is not None:
            self._open_first(run, self._first)

    def _open_first(self, run: OpenRun, index: int) -> None:
        if index < len(run.reader):
            self.go_to(index)
            self._open(index)
        else:
            self.browser.refuse(f"{run.name} has {len(run.reader)} rollouts, no number {index}")

    def _take_more(self, before: int | None) -> None:
        self.show_path()
        run = self.run
        if run is None or before is None:
            return
        self._draw_figures()
        self.show_rows()
        if self.is_following:
            self.table.action_jump(-1)
        wanted = run.selection.filter
        if wanted.texts:
            self.scan_filter(wanted, range(before if before < len(run.reader) else 0, len(run.reader)))

    def _draw_figures(self) -> None:
        run = self.run
        if run is not None:
            self.headline.update(headline(run.reader, run.stats, is_short=self.app.size.width < 80))
            self.page.show(partial(_overview, run.reader, run.stats))
            self.show_path()

    def _sort(self, name: str) -> None:
        if self.run is not None:
            keep = self.index()
            self.run.selection.sort_by(name)
            self.show_rows(keep)

    def _cells(self, row: int) -> Any:
        assert self.run is not None, "rows are drawn when there is a run"
        return row_of(self.run, self.run.selection.order[row])

    def say_where(self) -> None:
        """The status line: the place, the filter, what was looked for."""
        run = self.run
        if run is None:
            return
        shown, there = len(run.selection), len(run.reader)
        parts = [f"{whole(min(self.table.cursor + 1, shown))} of {whole(shown)}"]
        if run.selection.filter.source:
            parts.append(f"filter {run.selection.filter.source} ({whole(there)} in all)")
        if run.needle is not None:
            going = f", looked at {whole(run.looked_at)}" if run.looked_at is not None else ""
            parts.append(f"{run.needle.text!r}: {whole(len(run.found))} found{going}")
        if self.is_following:
            parts.append("following, F stops")
        if run.reader.num_broken:
            parts.append(f"{count(run.reader.num_broken, 'line')} could not be read")
        self.say("  |  ".join(parts))


def _overview(reader: EvaluationReader, stats: Mapping[str, Any], width: int) -> Content:
    return overview(reader, stats, width)
