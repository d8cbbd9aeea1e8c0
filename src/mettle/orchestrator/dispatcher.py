"""Which groups are open, which tasks wait for their turn. A pure state machine: no I/O, no clock of its own.

Invariant: each group that was opened ends in exactly one `Ending`, whatever happens (result, failure, cancellation),
and the number of permits taken is the number of open groups.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from mettle.records.tasks import TaskDraw


class Ending(StrEnum):
    """How an open group ended."""

    SCORED = "scored"
    PUT_BACK = "put_back"
    CUT_SHORT = "cut_short"
    CANCELLED = "cancelled"


class Blame(StrEnum):
    """What a failed attempt is laid to. `max_attempts` is for each of the first two by itself."""

    TASK = "task"
    WORKER = "worker"
    """The process died in which it was rolled out; whose doing that was, nobody knows before it happens again."""
    RUN = "run"
    """The run has lost its engine or every sandbox service for the time being: no number of these is too many."""


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that is being rolled out; `version` is the policy version acknowledged when it was opened."""

    draw: TaskDraw
    version: int
    opened_at: float


class Dispatcher:
    """Open groups and the queue of tasks that were drawn but are not open."""

    def __init__(self, max_open: int) -> None:
        self.max_open = max_open
        self.endings: Counter[Ending] = Counter()
        self.num_opened = 0
        self._open: dict[int, OpenGroup] = {}
        self._waiting: list[tuple[float, int, TaskDraw]] = []
        self._failures: dict[int, Counter[Blame]] = {}

    @property
    def num_open(self) -> int:
        """Groups that are being rolled out."""
        return len(self._open)

    @property
    def oldest_draw(self) -> int | None:
        """The lowest draw id among the open groups."""
        return min(self._open, default=None)

    @property
    def num_waiting(self) -> int:
        """Tasks that were drawn and are not open."""
        return len(self._waiting)

    @property
    def num_permits(self) -> int:
        """Groups that may still be opened."""
        return max(0, self.max_open - len(self._open))

    @property
    def next_due(self) -> float | None:
        """When the next waiting task may be opened."""
        return self._waiting[0][0] if self._waiting else None

    def wait(self, draws: Iterable[TaskDraw], *, due: float = 0.0) -> None:
        """Queue drawn tasks, to be opened at `due` or later."""
        for draw in draws:
            heapq.heappush(self._waiting, (due, draw.draw_id, draw))

    def take(self, limit: int, now: float) -> list[TaskDraw]:
        """Waiting tasks whose time has come, oldest first, at most `limit`."""
        taken: list[TaskDraw] = []
        while self._waiting and len(taken) < limit and self._waiting[0][0] <= now:
            taken.append(heapq.heappop(self._waiting)[2])
        return taken

    def open(self, draw: TaskDraw, version: int, now: float) -> OpenGroup:
        """Take a permit for a task."""
        assert draw.draw_id not in self._open, f"task draw {draw.draw_id} is open already"
        assert self.num_permits > 0, "a group was opened without a permit"
        self.num_opened += 1
        group = self._open[draw.draw_id] = OpenGroup(draw, version, now)
        return group

    def end(self, draw_id: int, ending: Ending) -> OpenGroup:
        """Give the permit back; each open group ends once."""
        group = self._open.pop(draw_id, None)
        assert group is not None, f"task draw {draw_id} ended without being open"
        self.endings[ending] += 1
        if ending is Ending.SCORED:
            self._failures.pop(draw_id, None)
        return group

    def count_failure(self, draw_id: int, blame: Blame) -> int:
        """Count a failed attempt of a task; returns how many there have been that are laid to the same."""
        counted = self._failures.setdefault(draw_id, Counter())
        counted[blame] += 1
        return counted[blame]

    def failures(self, draw_id: int) -> Mapping[Blame, int]:
        """Failed attempts of a task so far."""
        return self._failures.get(draw_id, Counter())

    def open_groups(self) -> list[OpenGroup]:
        """The open groups, oldest first."""
        return list(self._open.values())
