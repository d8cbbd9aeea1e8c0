"""What happens to the host under a run: its clock is set, its disk fills, or the supervisor did not run for a while.

Parts: `HostWatch`, `HostNews`. Invariants: nothing here is a fault of a process, and nothing is ended for it; each
thing is told once, the disk again when it has had room in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mettle.processes.liveness import TOLD_S
from mettle.runs.machine import HostMachine

LOW_DISK_BYTES = 32 * 2**20
JUMP_S = 5.0
"""A clock that is kept right by small corrections moves less than this between two looks."""


@dataclass(frozen=True, slots=True)
class HostNews:
    """An event of `kind`, a sentence, and its figures."""

    kind: str
    text: str
    data: dict[str, float] = field(default_factory=dict)


class HostWatch:
    """Looks at the host of the run at `path`; `look` should come every second or so."""

    def __init__(
        self,
        path: Path,
        machine: HostMachine,
    ) -> None:
        self._path = path
        self._machine = machine
        self._last: tuple[float, float] | None = None
        self.is_disk_low = False

    def look(self) -> list[HostNews]:
        """What is new since the last look."""
        now, wall = self._machine.now(), self._machine.wall()
        last, self._last = self._last, (now, wall)
        found = self._disk()
        if last is None:
            return found
        stood_s, jumped_s = now - last[0], (wall - last[1]) - (now - last[0])
        if stood_s > TOLD_S:
            text = f"the supervisor did not run for {stood_s:.0f} s; no silence of others counts for that time"
            found.append(HostNews("gap", text, {"age_s": round(stood_s, 1)}))
        if abs(jumped_s) > JUMP_S:
            way = "ahead, or the host slept" if jumped_s > 0 else "back"
            text = f"the host's clock was set {abs(jumped_s):.0f} s {way}: waits and limits go by another clock"
            found.append(HostNews("clock_jump", text, {"jumped_s": round(jumped_s, 1)}))
        return found

    def _disk(self) -> list[HostNews]:
        try:
            free = self._machine.free_bytes(self._path)
        except OSError:
            return []
        was_low, self.is_disk_low = self.is_disk_low, free < LOW_DISK_BYTES
        if was_low or not self.is_disk_low:
            return []
        text = f"only {free / 2**20:.0f} MiB are free at {self._path}: the run ends where the disk is full"
        return [HostNews("disk_low", text, {"free_bytes": free})]
