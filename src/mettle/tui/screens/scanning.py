"""Looking for texts in the rollouts of a run, in threads, while its screen answers to keys.

Parts: `ScanningScreen`, the base of the screen that shows a run. Invariant: what a search finds after another was
begun, or after its filter was changed, is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual import work
from textual.worker import get_current_worker

from mettle.evals.reader import EvaluationReader
from mettle.tui.filters import Filter
from mettle.tui.opened import OpenRun
from mettle.tui.parts import BrowserScreen
from mettle.tui.record_table import RecordTable
from mettle.tui.search import Needle, scan
from mettle.wording import whole


class ScanningScreen(BrowserScreen):
    """A screen with a run, whose rollouts can be searched."""

    run: OpenRun | None
    table: RecordTable

    def show_rows(self, keep: int | None = None) -> None:
        """Arrange and draw the rollouts."""
        raise NotImplementedError

    def go_to(self, index: int) -> None:
        """Put the cursor on a rollout."""
        raise NotImplementedError

    def say_where(self) -> None:
        """Fill the status line."""
        raise NotImplementedError

    @work(thread=True, group="filter")
    def scan_filter(self, wanted: Filter, indexes: range) -> None:
        """Look for the texts of a filter in these rollouts."""
        worker, run = get_current_worker(), self.run
        assert run is not None, "a filter is applied to a run"
        facts = run.reader.facts
        needles = [(Needle(term.text), term.is_absent) for term in wanted.texts]
        candidates = [index for index in indexes if index < len(facts) and wanted.accepts(facts[index])]

        def holds(row: Mapping[str, Any]) -> bool:
            return all(needle.is_in(row) is not is_absent for needle, is_absent in needles)

        def report(num: int, new: list[int]) -> None:
            self.app.call_from_thread(self.take_filtered, wanted, new, num, len(candidates))

        scan(run.reader, candidates, holds, report, lambda: worker.is_cancelled)

    def take_filtered(self, wanted: Filter, new: list[int], num: int, total: int) -> None:
        """Show what was found to have them, while it goes on."""
        run = self.run
        if run is None or run.selection.filter is not wanted or run.selection.holds_text is None:
            return
        run.selection.holds_text.update(new)
        if new:
            self.show_rows()
        if num < total:
            self.say(f"looked at {whole(num)} of {whole(total)}, {whole(len(run.selection))} shown")
        else:
            self.say_where()

    @work(thread=True, exclusive=True, group="search")
    def scan_search(self, needle: Needle, indexes: list[int]) -> None:
        """Look for a text in these rollouts."""
        worker, run = get_current_worker(), self.run
        assert run is not None, "a search is of a run"
        reader: EvaluationReader = run.reader

        def report(num: int, new: list[int]) -> None:
            self.app.call_from_thread(self.take_found, needle, new, num, len(indexes))

        scan(reader, indexes, needle.is_in, report, lambda: worker.is_cancelled)

    def take_found(self, needle: Needle, new: list[int], num: int, total: int) -> None:
        """Mark what was found to have it; the cursor goes to the first."""
        run = self.run
        if run is None or run.needle is not needle:
            return
        if new and not run.found:
            self.go_to(new[0])
        run.found.update(new)
        run.looked_at = num if num < total else None
        self.table.refresh()
        self.say_where()
