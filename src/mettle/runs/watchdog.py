"""The watchdog: every wait has an owner, an edge and a budget, and a wait past its budget is a stall.

Pure decisions over the waits in the journal. A stall is told once as a wait graph; if it lasts `patience` times its
budget, the process that is waited for is named for a restart, and after that restart the wait gets a fresh budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mettle.storage.journal import Wait

AWAITED_PROCESS = {"batch": "orchestrator", "weights": "trainer", "inference": "inference", "rollouts": "inference"}
"""Which process an edge waits for."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait past its budget. `restart` names the process to restart, or is None while there is still patience."""

    wait: Wait
    waited_s: float
    restart: str | None


@dataclass(slots=True)
class Watchdog:
    """Remembers which stalls were told and acted on. One a supervisor."""

    patience: float = 2.0
    _told: set[tuple[str, float]] = field(default_factory=set)
    _acted: dict[tuple[str, float], float] = field(default_factory=dict)

    def check(self, waits: Sequence[Wait], now: float) -> list[Stall]:
        """New stalls, and those whose patience has just run out. Each wait is told once and acted on once a budget."""
        stalls: list[Stall] = []
        for wait in waits:
            key = (wait.owner, wait.since)
            waited = now - self._acted.get(key, wait.since)
            if waited <= wait.budget_s:
                continue
            if waited > wait.budget_s * self.patience:
                self._acted[key] = now
                stalls.append(Stall(wait, now - wait.since, AWAITED_PROCESS.get(wait.edge)))
            elif key not in self._told:
                self._told.add(key)
                stalls.append(Stall(wait, now - wait.since, None))
        return stalls


def wait_graph(waits: Sequence[Wait], now: float) -> list[str]:
    """Who waits for whom and since when, one line a wait, for people."""
    return [
        f"{wait.owner} --{wait.edge}--> {AWAITED_PROCESS.get(wait.edge, '?')}: {wait.awaits}"
        f" ({now - wait.since:.0f} s of {wait.budget_s:.0f} s)"
        for wait in sorted(waits, key=lambda w: w.since)
    ]
