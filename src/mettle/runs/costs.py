"""What a run has cost over all of its lives: wall time, processor time, memory, deaths of its supervisor.

Parts: `LifeCosts` (the life that goes on), `totals` (of all lives so far), `settle` (adds a life to the run's figures),
`settle_last` (one that was killed, from its last beat). Invariant: each life is added once, whether it ended by itself
or was killed.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Collection

from mettle.processes.beats import Beat, read_beats
from mettle.processes.child import descendants, process_cpu_s, process_memory_bytes, process_parent
from mettle.storage.journal import Journal
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

LIFE, WALL_S, CPU_S, PEAK_BYTES = "life", "wall_s", "cpu_s", "peak_memory_bytes"
DEATHS = "supervisor_deaths"
SETTLED = "lives_settled"
MEMORY_EVERY_S = 5.0
MEMORY_AT_FIRST_S = 0.5
"""The first looks come as often as this and then after as long as the run has lasted, or a run of seconds would be told
by what its processes took before they had imported anything."""
MEMORY_SHARE = 100.0
"""The kernel walks every page of a process to say this: milliseconds each, a fifth of a second for one of several GB,
and seconds on a host that is overloaded. So there are so many times as long between two looks as one takes."""


class LifeCosts:
    """The figures of this life of the run, up to the newest `measure`."""

    def __init__(self, life: int) -> None:
        self.life = life
        self._started = time.monotonic()
        self._own_before_s = _own_cpu_s()
        self._cpu_s = 0.0
        self._lost_s = 0.0
        self._peak_bytes = 0
        self._next_memory = 0.0
        self._roots: dict[int, int] = {}
        self._grandchildren: dict[int, tuple[int, float]] = {}

    def measure(self, pids: Collection[int], beats: Collection[Beat]) -> None:
        """Look at the children that run and at all that they have started."""
        now = time.monotonic()
        is_memory_due = now >= self._next_memory
        if is_memory_due:
            # An engine of another package is several processes, of which none beats a heart of ours.
            self._roots = {below: pid for pid in pids for below in descendants(pid)}
        roots = self._roots | {b.pid: process_parent(b.pid) for b in beats if b.pid not in self._roots}
        others = roots.keys() - {*pids, os.getpid()}
        # A child that has ended is in our own figures, because it was waited for, with those that it has waited for.
        known = {pid: found for pid, found in self._grandchildren.items() if found[0] not in pids}
        self._grandchildren = known | {pid: (roots[pid], process_cpu_s(pid)) for pid in others}
        used_s = sum(cpu_s for _, cpu_s in self._grandchildren.values()) + sum(map(process_cpu_s, pids))
        self._cpu_s = max(self._cpu_s, _own_cpu_s() - self._own_before_s + self._lost_s + used_s)
        if is_memory_due:
            started = time.monotonic()
            memory = process_memory_bytes(os.getpid()) + sum(map(process_memory_bytes, {*pids, *others}))
            self._peak_bytes = max(self._peak_bytes, memory)
            pause_s = min(MEMORY_EVERY_S, max(MEMORY_AT_FIRST_S, now - self._started))
            self._next_memory = now + max(pause_s, MEMORY_SHARE * (time.monotonic() - started))

    def ended(self, pid: int, *, is_killed: bool) -> None:
        """A child is gone. One that was killed has waited for none of its own, whose time would be lost with it."""
        for other in [other for other, (parent, _) in self._grandchildren.items() if parent == pid]:
            _, cpu_s = self._grandchildren.pop(other)
            self._lost_s += cpu_s if is_killed else 0.0

    def figures(self) -> dict[str, float]:
        """As they stand in the supervisor's beat."""
        return {
            LIFE: float(self.life),
            WALL_S: time.monotonic() - self._started,
            CPU_S: max(self._cpu_s, _own_cpu_s() - self._own_before_s + self._lost_s),
            PEAK_BYTES: float(self._peak_bytes),
        }


def totals(run_dir: RunDir, journal: Journal) -> dict[str, float | None]:
    """The figures of all lives of a run, the one that goes on or was killed among them; None before the first."""
    last = _unsettled(run_dir, journal)
    found = {name: journal.fact(name) for name in (WALL_S, CPU_S, PEAK_BYTES)}
    if last is None:
        return found
    added = {name: (found[name] or 0.0) + last.figures[name] for name in (WALL_S, CPU_S)}
    return {**added, PEAK_BYTES: max(found[PEAK_BYTES] or 0, int(last.figures[PEAK_BYTES]))}


def settle(ledger: Ledger, figures: dict[str, float]) -> None:
    """Add a life to the figures of its run; a life that was added already changes nothing."""
    journal = ledger.journal
    with ledger.database.transaction():
        if figures.get(LIFE, 0.0) <= (journal.fact(SETTLED) or 0):
            return
        journal.set_fact(WALL_S, (journal.fact(WALL_S) or 0.0) + figures[WALL_S])
        journal.set_fact(CPU_S, (journal.fact(CPU_S) or 0.0) + figures[CPU_S])
        journal.set_fact(PEAK_BYTES, max(journal.fact(PEAK_BYTES) or 0, int(figures[PEAK_BYTES])))
        journal.set_fact(SETTLED, int(figures[LIFE]))


def settle_last(run_dir: RunDir, ledger: Ledger) -> tuple[int, str]:
    """Add the life before this one, where its supervisor was killed.

    Returns the number of this life, and how that one ended (empty where nobody was killed).
    """
    journal, text = ledger.journal, ""
    with ledger.database.transaction():
        last = _unsettled(run_dir, journal)
        if last is not None:
            settle(ledger, last.figures)
            journal.set_fact(DEATHS, (journal.fact(DEATHS) or 0) + 1)
            text = f"the supervisor (pid {last.pid}) was killed {last.figures[WALL_S]:.0f} s after its start"
            journal.event("supervisor", "supervisor_died", text)
        life = int(journal.fact("lives") or 0) + 1
        journal.set_fact("lives", life)
    return life, text


def _unsettled(run_dir: RunDir, journal: Journal) -> Beat | None:
    """The supervisor's last beat, where the life that it is of is not in the run's figures yet."""
    last = read_beats(run_dir.beats).get("supervisor")
    is_new = last is not None and last.figures.get(LIFE, 0.0) > (journal.fact(SETTLED) or 0)
    return last if is_new else None


def _own_cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
