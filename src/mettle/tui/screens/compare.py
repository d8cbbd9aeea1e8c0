"""Two evaluations side by side: what changed, and the tasks that changed most.

Parts: `CompareScreen`. The comparison itself is `mettle.evals.compare`. Invariant: A is the one that was
marked first; a change is always B - A.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from mettle.errors import MettleError
from mettle.evals.compare import Comparison, TaskChange, compare_evaluations
from mettle.tui.opened import OpenRun, well_formed
from mettle.tui.overview import MUTED, Part
from mettle.tui.parts import BrowserScreen
from mettle.tui.record_table import Cell, Column, RecordTable
from mettle.tui.text import pad
from mettle.wording import bar, format_interval, format_reward, one_line, percent, whole

BAR_CELLS = 24
SHOWN = ("changed", "lost", "gained", "all")


class CompareScreen(BrowserScreen):
    """What changed from A to B."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "which", "Which tasks"),
        Binding("a", "open('a')", "Open in A"),
    ]

    def __init__(self, before: Path, after: Path) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.found: Comparison | None = None
        self.runs: tuple[OpenRun, OpenRun] | None = None
        self.which = SHOWN[0]
        self.tasks: list[TaskChange] = []
        self.head = Static(markup=False, id="comparison")
        self.table = RecordTable(
            [
                Column("task", "task", 10, is_right=True),
                Column("before", "A", 7, is_right=True),
                Column("after", "B", 7, is_right=True),
                Column("change", "B - A", 7, is_right=True),
                Column("passed", "passed A to B", 16, is_right=True, rank=1),
                Column("bar", "", min_width=12),
            ],
            id="changes",
            empty="reading...",
        )

    def body(self) -> Iterable[Widget]:
        """The verdict, and the tasks."""
        yield self.head
        yield self.table

    def path(self) -> Sequence[str]:
        """Both names."""
        return ("compare", f"{self.before.name} and {self.after.name}")

    def on_mount(self) -> None:
        """Read both."""
        super().on_mount()
        self.table.focus()
        self.read()

    @work(thread=True, exclusive=True)
    def read(self) -> None:
        """Read and compare, in a thread."""
        try:
            runs = OpenRun(self.before), OpenRun(self.after)
            with well_formed(self.after):
                found = compare_evaluations(runs[0].reader, runs[1].reader)
        except MettleError as error:
            self.app.call_from_thread(self._give_up, str(error))
            return
        self.app.call_from_thread(self._take, runs, found)

    def action_which(self) -> None:
        """Show the tasks that changed, that were lost, that were gained, or all."""
        self.which = SHOWN[(SHOWN.index(self.which) + 1) % len(SHOWN)]
        self._show()

    def on_record_table_chosen(self, event: RecordTable.Chosen) -> None:
        """Open the task in B."""
        self.action_open("b")

    def action_open(self, which: str) -> None:
        """Open the task under the cursor in A or in B."""
        if self.runs is None or self.table.cursor >= len(self.tasks):
            return
        run = self.runs[which == "b"]
        members = run.members(self.tasks[self.table.cursor].example_id)
        if members:
            self.browser.open_task(run, members[0])

    def _give_up(self, why: str) -> None:
        self.table.empty = "nothing to compare"
        self.table.show(0)
        self.head.update(Content.assemble((one_line(why, 1000), "$error")))

    def _take(self, runs: tuple[OpenRun, OpenRun], found: Comparison) -> None:
        self.runs, self.found = runs, found
        self.head.update(_verdict(runs, found))
        self._show()

    def _show(self) -> None:
        found = self.found
        if found is None:
            return
        changed = sorted((task for task in found.tasks if task.change), key=lambda task: task.change)
        self.tasks = {"changed": changed, "lost": found.lost, "gained": found.gained, "all": found.tasks}[self.which]
        self.table.empty = "no task is like that"
        self.table.show(len(self.tasks), self._cells)
        self.table.cursor = 0
        names = ("changed", "lost", "gained")
        counts = dict(zip(names, (len(changed), len(found.lost), len(found.gained)), strict=True))
        told = ", ".join(f"{whole(count)} {name}" for name, count in counts.items())
        self.say(f"showing {self.which}  |  {told}, of {whole(len(found.tasks))} tasks that both have")

    def _cells(self, row: int) -> Sequence[Cell]:
        task = self.tasks[row]
        tone = "good" if task.change > 0 else "bad" if task.change < 0 else "dim"
        return (
            Cell(str(task.example_id)), Cell(format_reward(task.reward_before)), Cell(format_reward(task.reward_after)),
            Cell(f"{task.change:+.3f}", tone),
            Cell(f"{percent(task.passed_before)} to {percent(task.passed_after)}", "dim"),
            Cell(bar(min(1.0, abs(task.change)), BAR_CELLS), tone),
        )  # fmt: skip


def _verdict(runs: tuple[OpenRun, OpenRun], found: Comparison) -> Content:
    parts: list[Part] = []
    for word, run in zip("AB", runs, strict=True):
        entry, reward = run.reader.entry, run.stats.get("reward")
        about = f"{one_line(entry.env_id, 40)} with {one_line(entry.model, 40)}, {run.name}"
        parts += [
            (f"{word}  ", "bold $secondary"),
            pad(about, 60),
            (format_reward(reward["mean"]) if reward else "-", "bold"),
            "\n",
        ]
    change = found.difference
    colour = "$success" if change.mean > 0 else "$error" if change.mean < 0 else MUTED
    parts += [("B - A  ", MUTED), (f"{change.mean:+.3f}", f"bold {colour}"), f" {format_interval(change.interval)}"]
    if change.p_value is not None:
        sure = "a real change" if change.p_value < 0.05 else "could be chance"
        parts += [("  p ", MUTED), f"{change.p_value:.3g}", (f", {sure}", MUTED)]
    parts += ["\n", f"{whole(found.num_risen)} rose, {whole(found.num_fallen)} fell"]
    parts.append((f"  sign test p {found.sign_p_value:.3g}", MUTED))
    for name, metric in list(found.metrics.items())[:4]:
        parts += [
            "\n",
            (pad(one_line(name, 40), 24), MUTED),
            f"{metric.difference.mean:+.3f} {format_interval(metric.difference.interval)}",
        ]
    for warning in found.warnings[:4]:
        parts += ["\n", (f"note: {one_line(warning, 200)}", "$warning")]
    return Content.assemble(*parts)
