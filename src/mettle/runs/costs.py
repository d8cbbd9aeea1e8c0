"""What a run has cost over all of its lives: wall time, processor time, memory, deaths of its supervisor.

Parts: `LifeCosts` (the life that goes on), `settle` (adds a life to the run's figures), `settle_last` (one that was
killed, from its last beat). Invariant: each life is added once, whether it ended by itself or was killed.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Collection, Iterable

from mettle.processes.beats import Beat, read_beats
from mettle.processes.child import process_cpu_s, process_memory_bytes
from mettle.processes.liveness import is_worker
from mettle.storage.journal import Journal
from mettle.storage.run_dir import RunDir

LIFE, WALL_S, CPU_S, PEAK_BYTES = "life", "wall_s", "cpu_s", "peak_memory_bytes"
DEATHS = "supervisor_deaths"


class LifeCosts:
    """The figures of this life of the run, up to the newest `measure`."""

    def __init__(self, life: int) -> None:
        self.life = life
        self._started = time.monotonic()
        self._own_before_s = _own_cpu_s()
        self._cpu_s = 0.0
        self._peak_bytes = 0

    def measure(self, pids: Iterable[int], beats: Collection[Beat]) -> None:
        """Look at the children that run and at the workers that they have started."""
        workers = [beat.pid for beat in beats if is_worker(beat.name)]
        living = {*pids, *workers}
        # Those that have ended are in our own figures, because they were waited for.
        cpu_s = _own_cpu_s() - self._own_before_s + sum(process_cpu_s(pid) for pid in living)
        self._cpu_s = max(self._cpu_s, cpu_s)
        memory = process_memory_bytes(os.getpid()) + sum(process_memory_bytes(pid) for pid in living)
        self._peak_bytes = max(self._peak_bytes, memory)

    def figures(self) -> dict[str, float]:
        """As they stand in the supervisor's beat."""
        return {
            LIFE: float(self.life),
            WALL_S: time.monotonic() - self._started,
            CPU_S: max(self._cpu_s, _own_cpu_s() - self._own_before_s),
            PEAK_BYTES: float(self._peak_bytes),
        }


def settle(journal: Journal, figures: dict[str, float]) -> None:
    """Add a life to the figures of its run; a life that was added already changes nothing."""
    if figures.get(LIFE, 0.0) <= (journal.fact("lives_settled") or 0):
        return
    journal.set_fact(WALL_S, (journal.fact(WALL_S) or 0.0) + figures[WALL_S])
    journal.set_fact(CPU_S, (journal.fact(CPU_S) or 0.0) + figures[CPU_S])
    journal.set_fact(PEAK_BYTES, max(journal.fact(PEAK_BYTES) or 0, int(figures[PEAK_BYTES])))
    journal.set_fact("lives_settled", int(figures[LIFE]))


def settle_last(run_dir: RunDir, journal: Journal) -> int:
    """Add the life before this one, where its supervisor was killed; returns the number of this life."""
    last = read_beats(run_dir.beats).get("supervisor")
    if last is not None and last.figures.get(LIFE, 0.0) > (journal.fact("lives_settled") or 0):
        settle(journal, last.figures)
        journal.set_fact(DEATHS, (journal.fact(DEATHS) or 0) + 1)
        text = f"the supervisor (pid {last.pid}) was killed {last.figures[WALL_S]:.0f} s after its start"
        journal.event("supervisor", "supervisor_died", text)
    life = int(journal.fact("lives") or 0) + 1
    journal.set_fact("lives", life)
    return life


def _own_cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
