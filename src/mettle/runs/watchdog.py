"""The watchdog: every wait has an owner, an edge and a budget, and a wait that uses up its budget is a stall.

Pure decisions over the waits in the journal. A wait that has used a quarter of its budget is told as a wait graph; at
half of it the awaited process is named for a restart, once, which leaves the other half for recovery. At the end of
the budget the owner gives up by itself, cleanly. So a stall ends in recovery or in an exit, and never in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mettle.storage.journal import Wait

AWAITED_PROCESS = {"batch": "orchestrator", "weights": "trainer", "inference": "inference", "rollouts": "inference"}
"""Which process an edge waits for."""

TOLD_AT = 0.25
RESTARTED_AT = 0.5


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait that is running out of its budget. `restart` names the process to restart, or is None for now."""

    wait: Wait
    waited_s: float
    restart: str | None


@dataclass(slots=True)
class Watchdog:
    """Remembers which stalls were told and acted on. One a supervisor."""

    _told: set[tuple[str, float]] = field(default_factory=set)
    _acted: set[tuple[str, float]] = field(default_factory=set)

    def check(self, waits: Sequence[Wait], now: float) -> list[Stall]:
        """Stalls that are new since the last call. Each wait is told once and acted on once."""
        stalls: list[Stall] = []
        for wait in waits:
            key = (wait.owner, wait.since)
            waited = now - wait.since
            awaited = AWAITED_PROCESS.get(wait.edge)
            if waited > wait.budget_s * RESTARTED_AT and awaited is not None and key not in self._acted:
                self._acted.add(key)
                self._told.add(key)
                stalls.append(Stall(wait, waited, awaited))
            elif waited > wait.budget_s * TOLD_AT and key not in self._told:
                self._told.add(key)
                stalls.append(Stall(wait, waited, None))
        return stalls


def wait_graph(waits: Sequence[Wait], now: float) -> list[str]:
    """Who waits for whom and since when, one line a wait, for people."""
    return [
        f"{wait.owner} --{wait.edge}--> {AWAITED_PROCESS.get(wait.edge, '?')}: {wait.awaits}"
        f" ({now - wait.since:.0f} s of {wait.budget_s:.0f} s)"
        for wait in sorted(waits, key=lambda w: w.since)
    ]
