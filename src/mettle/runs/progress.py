"""What a person sees while a run goes: its stage, its progress, the reward as it moves.

On a terminal a live panel; elsewhere one line when something has changed. Everything is read from the journal, so the
same display works for a run that another process supervises.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mettle.evals.estimator import mean_of
from mettle.runs.pace import StepPace, time_left
from mettle.storage.evals import EvalRow, read_evals
from mettle.storage.journal import Journal
from mettle.storage.ledger import Ledger
from mettle.wording import count, format_interval, format_reward, sparkline

LINE_EVERY_S = 10.0
TRAINING = "training"
WARMING_UP = "warming up the policy on demonstrations"
TROUBLES = ("worker_died", "stall", "engine_lost", "services_lost", "mismatch", "too_long")
SHOWN_NOTES = 3
CURVE_POINTS = 320


@dataclass(frozen=True, slots=True)
class WarmUpProgress:
    """How far a warm-up is. It ends at `goal`, the reward that is asked for, or has failed after `max_steps`."""

    step: int
    max_steps: int
    reward: float | None
    goal: float

    def __str__(self) -> str:
        reward = "not measured yet" if self.reward is None else f"reward {self.reward:.2f}"
        return f"step {self.step} of at most {self.max_steps}, {reward}, ends at {self.goal:g}"


class RewardCurve:
    """The reward over a run, step by step at first and then in means of as many steps each: no more than twice
    `CURVE_POINTS`, so that a look takes as long after 50,000 steps as after 500."""

    def __init__(self) -> None:
        self._newest_step = -1
        self._per_mean = 1
        self._means: list[float] = []
        self._open: list[float] = []  # of the mean that is not full

    def read(self, journal: Journal) -> list[float]:
        """Take what has come since the last look; the points."""
        for step, value in journal.metric("reward/mean", after=self._newest_step):
            self._newest_step = step
            self._add(value)
        return [*self._means, *([mean_of(self._open)] if self._open else [])]

    def _add(self, value: float) -> None:
        self._open.append(value)
        if len(self._open) < self._per_mean:
            return
        self._means.append(mean_of(self._open))
        self._open.clear()
        if len(self._means) == 2 * CURVE_POINTS:
            self._means = [mean_of(pair) for pair in zip(self._means[::2], self._means[1::2], strict=True)]
            self._per_mean *= 2


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """A run at one moment. `rewards` are the points of its curve."""

    stage: str
    step: int
    max_steps: int
    rewards: list[float]
    evals: list[EvalRow]
    figures: dict[str, float]
    warm_up: WarmUpProgress | None = None

    @property
    def done(self) -> tuple[int, int]:
        """Steps taken and steps in all, of the stage that it is at."""
        return (self.warm_up.step, self.warm_up.max_steps) if self.warm_up else (self.step, self.max_steps)


def read_snapshot(ledger: Ledger, max_steps: int, *, curve: RewardCurve | None = None) -> ProgressSnapshot:
    """The state of the run as the journal has it. `curve` has the rewards that were read before."""
    journal = ledger.journal
    rewards = (curve or RewardCurve()).read(journal)
    measured = journal.latest()
    latest = {name: value for name, (_, value) in measured.items()}
    newest = ledger.newest_version()
    step = newest.weights.version if newest is not None else 0
    evals = [row for row in read_evals(ledger.database) if row.is_finished]
    running = {p.name for p in journal.processes() if p.state in ("starting", "running")}
    stage = stage_of(running, {row.kind for row in evals}, step, max_steps, is_published=newest is not None)
    goal = journal.fact("warm_up_goal") if stage == WARMING_UP else None
    return ProgressSnapshot(
        stage=stage,
        step=step,
        max_steps=max_steps,
        rewards=rewards,
        evals=evals,
        figures=latest,
        warm_up=goal
        and WarmUpProgress(
            measured.get("sft/loss", (0, 0.0))[0], goal["max_steps"], latest.get("sft/reward"), goal["reward"]
        ),
    )


def stage_of(running: set[str], evals: set[str], step: int, max_steps: int, *, is_published: bool) -> str:
    """What a run is at, in words, from what runs and what is there."""
    if "sft" in running:
        return WARMING_UP
    if "policy" in running:
        return "making the policy"
    if not is_published:
        return "starting the engine, the trainer and the orchestrator"
    if "final" in evals:
        return "finished"
    if step >= max_steps:
        return "evaluating the last version"
    if step == 0 and "baseline" not in evals:
        return "evaluating the baseline"
    return TRAINING


class RunProgress:
    """Shows a run until the block ends. `update` may be called as often as one likes; `notes` may grow meanwhile."""

    def __init__(
        self, ledger: Ledger, max_steps: int, *, title: str, is_quiet: bool = False, notes: Sequence[str] = ()
    ) -> None:
        self._ledger = ledger
        self._max_steps = max_steps
        self._title = title
        self.page: str | None = None
        self._has_said_page = False
        self._is_quiet = is_quiet
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._started = time.monotonic()
        self._next_update = 0.0
        self._last_line = ("", -1)
        self._pace = StepPace()
        self._paced_stage = ""
        self._next_line = 0.0
        self._notes = notes
        self._num_notes = 0
        self._curve = RewardCurve()
        self._last_event = ledger.journal.newest_event_id()
        self._told: list[str] = []

    def __enter__(self) -> RunProgress:
        if not self._is_quiet and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update(is_last=True)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, *, is_last: bool = False) -> None:
        """Redraw if something is due; reading the journal costs about a millisecond."""
        now = time.monotonic()
        if self._is_quiet or (now < self._next_update and not is_last):
            return
        self._next_update = now + 0.5
        snapshot = read_snapshot(self._ledger, self._max_steps, curve=self._curve)
        self._keep_pace(snapshot, now)
        new = self._news()
        if self._live is not None:
            self._live.update(self._panel(snapshot, now), refresh=True)
        else:
            for note in new:
                print(f"[{now - self._started:5.0f} s] note: {note}", file=sys.stderr, flush=True)
            self._print_line(snapshot, now)

    def _keep_pace(self, snapshot: ProgressSnapshot, now: float) -> None:
        if snapshot.stage != self._paced_stage:
            self._pace, self._paced_stage = StepPace(), snapshot.stage
        self._pace.read(now, snapshot.done[0])

    def _time_left(self, snapshot: ProgressSnapshot, now: float) -> str:
        if snapshot.stage not in (WARMING_UP, TRAINING):
            return ""
        step, max_steps = snapshot.done
        text = time_left(self._pace.seconds_left(now, max_steps - step))
        return text.replace("about", "at most", 1) if snapshot.warm_up else text

    def _news(self) -> list[str]:
        """What was told since the last update: by the supervisor itself, by the other processes in the journal."""
        new = list(self._notes[self._num_notes :])
        self._num_notes += len(new)
        while events := self._ledger.journal.events(after_id=self._last_event):
            self._last_event = events[-1].event_id
            new += [event.message for event in events if event.kind in TROUBLES and event.source != "supervisor"]
        self._told = [*self._told, *new][-SHOWN_NOTES:]
        return new

    def _print_line(self, snapshot: ProgressSnapshot, now: float) -> None:
        if self.page and not self._has_said_page:
            self._has_said_page = True
            print(f"[{now - self._started:5.0f} s] its page is {self.page}", file=sys.stderr, flush=True)
        is_new_stage = snapshot.stage != self._last_line[0]
        if not is_new_stage and (now < self._next_line or snapshot.done[0] == self._last_line[1]):
            return
        self._last_line = (snapshot.stage, snapshot.done[0])
        self._next_line = now + LINE_EVERY_S
        line = f"[{now - self._started:5.0f} s] {snapshot.stage}"
        if snapshot.warm_up:
            line += f": {snapshot.warm_up}"
        elif snapshot.rewards:
            line += f": step {snapshot.step}/{snapshot.max_steps}, {describe(snapshot.figures)}"
        if left := self._time_left(snapshot, now):
            line += f", {left}"
        print(line, file=sys.stderr, flush=True)

    def _panel(self, snapshot: ProgressSnapshot, now: float) -> RenderableType:
        head = Text.assemble((self._title, "bold"), f"   {now - self._started:4.0f} s")
        if self.page:
            head.append(f"   {self.page}", style="cyan underline")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        grid.add_row("stage", snapshot.stage)
        bar = Table.grid(padding=(0, 2))
        step, max_steps = snapshot.done
        left = self._time_left(snapshot, now)
        bar.add_row(ProgressBar(total=max(1, max_steps), completed=step, width=40), f"{step}/{max_steps}", left)
        grid.add_row("steps", bar)
        if snapshot.warm_up:
            grid.add_row("", str(snapshot.warm_up))
        if snapshot.rewards:
            grid.add_row("reward", f"{sparkline(snapshot.rewards, 40)}  {snapshot.figures['reward/mean']:.3f}")
        for row in snapshot.evals:
            grid.add_row(f"{row.kind} held-out", describe_eval(row))
        if snapshot.figures:
            grid.add_row("", Text(describe(snapshot.figures), style="dim"))
        for note in self._told:
            grid.add_row("note", Text(note, style="yellow", overflow="fold"))
        return Group(head, grid)


def describe(figures: dict[str, float]) -> str:
    """The figures worth a glance, those that there are."""
    parts = (
        ("reward {:.3f}", "reward/mean"),
        ("staleness {:.2f}", "staleness/mean"),
        ("mismatch {:.1e}", "mismatch_kl/mean"),
        ("entropy {:.2f}", "entropy/mean"),
        ("{:,.0f} tok/s sampled", "throughput/inference_tokens_per_s"),
        ("{:,.0f} tok/s trained", "throughput/trainer_tokens_per_s"),
    )
    return ", ".join(form.format(figures[name]) for form, name in parts if name in figures)


def describe_eval(row: EvalRow) -> str:
    """`0.531 [0.512, 0.550] on 512 tasks, v0`."""
    if row.mean is None:
        return f"no rollout has a reward ({row.num_errors} errors)"
    interval = format_interval((row.ci_low, row.ci_high))
    return (
        f"{format_reward(row.mean)}{interval and ' '}{interval} on {count(row.num_tasks, 'task')}, v{row.version_max}"
    )
