"""One task: its rollouts side by side, and what each of them said last.

Parts: `TaskScreen`. Invariant: the prompt is that of the task; what is below it is of the rollout under the cursor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from mettle.errors import MettleError
from mettle.evals.estimator import mean_of
from mettle.evals.output import messages_of
from mettle.records.tasks import content_of
from mettle.tui.blocks import blocks_of
from mettle.tui.opened import OpenRun
from mettle.tui.overview import MUTED, Part
from mettle.tui.parts import BrowserScreen
from mettle.tui.record_table import RecordTable
from mettle.tui.screens.rows import member_columns, member_row
from mettle.tui.transcript import Transcript
from mettle.wording import count, format_reward, one_line, printable

PROMPT_CHARS = 3_000


class TaskScreen(BrowserScreen):
    """The rollouts of the task that rollout `index` is of."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,l", "task(1)", "Next task", key_display="\u2190\u2192"),
        Binding("left,h", "task(-1)", "Previous task", show=False),
    ]

    def __init__(self, run: OpenRun, index: int) -> None:
        super().__init__()
        self.run = run
        facts = run.facts(index)
        self.example_id = facts.example_id if facts is not None else None
        self.members: list[int] = []
        self.table = RecordTable(member_columns(run.metrics), id="members")
        self.preview = Transcript(id="preview")
        self.asked = Static(markup=False)
        self._first = index

    def body(self) -> Iterable[Widget]:
        """The prompt, the rollouts, the end of one of them."""
        yield VerticalScroll(self.asked, id="task")
        yield self.table
        yield self.preview

    def path(self) -> Sequence[str]:
        """Environment, model, run, task."""
        entry = self.run.reader.entry
        return (entry.env_id, entry.model, self.run.name, f"task {self.example_id}")

    def on_mount(self) -> None:
        """Show it."""
        super().on_mount()
        self.table.focus()
        self.call_after_refresh(self._show)

    def on_record_table_moved(self, event: RecordTable.Moved) -> None:
        """Show what that rollout said."""
        self._show_preview()

    def on_record_table_chosen(self, event: RecordTable.Chosen) -> None:
        """Open it."""
        self.browser.open_rollout(self.run, self.members[event.row], lambda: self.members, self._go_to)

    def action_task(self, by: int) -> None:
        """Show the task that comes next in the evaluation."""
        tasks = list(dict.fromkeys(facts.example_id for facts in self.run.reader.facts))
        place = tasks.index(self.example_id) + by if self.example_id in tasks else 0
        if 0 <= place < len(tasks):
            self.example_id = tasks[place]
            self._first = -1
            self._show()
            self.show_path()

    def _show(self) -> None:
        self.members = self.run.members(self.example_id)
        metrics = self.run.metrics
        self.table.show(len(self.members), lambda row: member_row(self.run, self.members[row], metrics))
        self.table.cursor = self.members.index(self._first) if self._first in self.members else 0
        row = self._row(self.table.cursor)
        self.asked.update(_prompt(row))
        self._show_preview()
        self._say_spread()

    def _say_spread(self) -> None:
        known = [self.run.facts(index) for index in self.members]
        rewards = [facts.reward for facts in known if facts is not None and facts.reward is not None]
        parts = [f"{count(len(self.members), 'rollout')} of task {one_line(self.example_id, 40)}"]
        if rewards:
            passed = sum(self.run.reader.pass_rule.holds(facts) for facts in known if facts is not None)
            parts.append(f"mean {format_reward(mean_of(rewards))}, {passed} passed")
            spread = max(rewards) - min(rewards)
            parts.append(
                f"spread {format_reward(spread)}" if spread > 1e-9 else "all the same: no signal to learn from"
            )
        self.say("  |  ".join(parts))

    def _show_preview(self) -> None:
        row = self._row(self.table.cursor)
        asked = len(messages_of(row.get("prompt")))
        said = [block for block in blocks_of(row) if block.message >= asked]
        last = said[-1].message if said else 0
        shown = [block for block in said if block.message == last or block.kind == "error"]
        self.preview.show(shown)

    def _row(self, place: int) -> Mapping[str, Any]:
        try:
            return self.run.reader.row(self.members[place]) if place < len(self.members) else {}
        except MettleError as error:
            self.browser.refuse(str(error))
            return {}

    def _go_to(self, index: int) -> None:
        if index in self.members:
            self.table.cursor = self.members.index(index)


def _prompt(row: Mapping[str, Any]) -> Content:
    """What was asked last, and what is expected."""
    asked = [message for message in messages_of(row.get("prompt")) if message.get("role") != "system"]
    parts: list[Part] = [("asked  ", MUTED), printable(content_of(asked[-1])[:PROMPT_CHARS]) if asked else "-"]
    if row.get("answer"):
        parts += ["\n", ("expected  ", MUTED), (one_line(row["answer"], 500), "$success")]
    return Content.assemble(*parts)
