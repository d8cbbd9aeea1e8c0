"""How many mappings the processes of a test or a machine have: each is memory of the kernel's, up to 14 MB a process,
and a fork copies all of them.

To count them is to list them, so that nothing is counted while the processes have no room for many, a new process has
as many as its parent until it is its turn, and a turn is short. Invariant: what cannot be looked at is counted as full.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from mettle.sandbox.zygote import procfs

MAPPING_BYTES: Final = 224
_UNSUSPICIOUS: Final = (32 << 20) // MAPPING_BYTES  # of all processes together, one for each page they have
_MAX_MAPPINGS: Final = 65_530  # of a process, unless the host allows more
_TURN_S: Final = 0.02
_PAUSE_S: Final = 0.01
_MAX_LOOK_S: Final = 0.05  # at one process: the most mappings there may be are listed in half of that


class _Count(NamedTuple):
    counted: float
    number: int


class Mappings:
    """Counts them, the longest known first."""

    def __init__(self) -> None:
        self._known: dict[int, _Count] = {}
        self._next_turn = 0.0

    def num_bytes(self, pages: Mapping[int, int]) -> dict[int, int]:
        """What they take, by process; `pages` is how large each one's address space is."""
        if sum(pages.values()) <= _UNSUSPICIOUS:
            return dict.fromkeys(pages, 0)
        self._known = {pid: self._known.get(pid, _Count(0.0, 0)) for pid in pages}
        now = time.monotonic()
        if now >= self._next_turn:
            self._count(pages, now + _TURN_S)
        for pid in sorted(pages):  # parents before their children
            if not self._known[pid].counted:
                self._known[pid] = self._inherited(pid)
        return {pid: count.number * MAPPING_BYTES for pid, count in self._known.items()}

    def _inherited(self, pid: int) -> _Count:
        above = self._known.get(procfs.state_and_parent(pid)[1])
        return _Count(0.0, above.number if above else 0)

    def _count(self, pages: Mapping[int, int], until: float) -> None:
        for pid in sorted(pages, key=lambda pid: self._known[pid].counted):
            self._known[pid] = _Count(time.monotonic(), _num_mappings(pid, pages[pid]))
            if time.monotonic() > until:
                break
        self._next_turn = time.monotonic() + _PAUSE_S


def _num_mappings(pid: int, num_pages: int) -> int:
    try:
        return procfs.num_lines(pid, "maps", _MAX_LOOK_S)
    except (PermissionError, TimeoutError):  # it has closed itself to inspection, or holds it up by forking and mapping
        return min(num_pages, _MAX_MAPPINGS)
    except OSError:
        return 0


def status_number(pid: int, name: bytes) -> int:
    """A line of a process's status; 0 if there is none."""
    try:
        lines = procfs.read(pid, "status").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
    except (OSError, IndexError):
        return 0
