"""What all processes of a cell have used of the processors, those included that nobody has waited for.

Two counters of the kernel's that no process inside can leave: a software event of perf that process 1 opens on itself
and every child inherits, dead or alive; and `cpu.stat` of a cgroup that the cell has for itself. A process that ignores
SIGCHLD, whose children's time the kernel adds up nowhere else, is counted by both.
Invariant: both are open before any code is there, and are process 1's alone: a test's process closes what it inherits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Final

from mettle.sandbox.zygote import kernel

_STAT_BYTES: Final = 4096
_EVENT_BYTES: Final = 8


class Meter:
    """An open counter; `kind` is "event" or "cgroup"."""

    def __init__(self, kind: str, descriptor: int) -> None:
        self.kind = kind
        self._descriptor = descriptor

    def used_s(self) -> float:
        """Processor seconds of all that ever ran in this cell, except of process 1."""
        own_s = time.process_time()  # asking for it also brings the kernel's sums up to date
        if self.kind == "event":
            return int.from_bytes(os.read(self._descriptor, _EVENT_BYTES), "little") / 1e9 - own_s
        return _usage_s(os.pread(self._descriptor, _STAT_BYTES, 0)) - own_s


def open_meter(*, may_use_event: bool, entrances: Sequence[int]) -> Meter | None:
    """The meter of this cell, in which this process is process 1; None where the host has none for it.

    `entrances` are `cgroup.procs` (to be written) and `cpu.stat` of the cell's cgroup, which the owner has opened.
    """
    if entrances:
        procs, stat = entrances
        with contextlib.suppress(OSError):
            if os.write(procs, b"0") == 1:
                os.close(procs)
                return Meter("cgroup", stat)
    if may_use_event:
        with contextlib.suppress(OSError):
            return Meter("event", kernel.open_task_clock())
    return None


def why_no_event() -> str:
    """Try to open one; "" or what the host says to it."""
    try:
        os.close(kernel.open_task_clock())
    except OSError as error:
        return f"{error.strerror}"
    return ""


def _usage_s(text: bytes) -> float:
    """From `usage_usec 12345`, the first line of a `cpu.stat`."""
    return int(text.split(maxsplit=2)[1]) / 1e6
