"""The processor time of a test, that of processes which nobody has waited for included.

The kernel adds up what a process has used and what the children it waited for have used. A process that ignores
SIGCHLD waits for none: theirs is lost as they end, and code that burns time only in such children would use none.
Process 1 cannot forbid that (what a handler is lies in the code's memory), so it asks a counter that nothing inside can
leave (`meter.py`). Where the host has none it also counts what it sees: a process that runs when it looks, and is gone
at the next look, stands for all that ran in between.
Invariant: what the kernel has added up decides, unless there is no meter and what was seen is far above it.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final, NamedTuple

from mettle.sandbox.zygote import procfs, watch
from mettle.sandbox.zygote.meter import Meter

# What was seen is an estimate. It counts only where it is beyond this many times what the kernel says, and this more.
_FACTOR: Final = 2.0
_MARGIN_S: Final = 0.25
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_load: list[int] = []  # the host's /proc/loadavg, which says how many of its threads are runnable


class _Seen(NamedTuple):
    """A process at a look: its clock, and what the time since the look before was worth if nobody tells otherwise."""

    clock_s: float
    worth_s: float


def keep_load() -> None:
    """Open what tells how busy the host is, before this process's own /proc covers it."""
    with contextlib.suppress(OSError):
        _load[:] = [os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)]


class ProcessorTime:
    """Of one test, whose first process had used `spent_s` before it began; by the cell's meter, if it has one."""

    def __init__(self, spent_s: float, now: float, meter: Meter | None = None) -> None:
        self._meter = meter
        self._metered_from_s = meter.used_s() if meter else 0.0
        self._seen: dict[int, _Seen] = {}
        self._observed_s = -spent_s
        self._spent_s = spent_s
        self._used_s = 0.0
        self._looked = now

    def look(self, pids: list[int], now: float) -> float:
        """Seconds used until now, from the processes that there are."""
        if self._meter is not None:
            return self._ask(self._meter)
        share, since_s, self._looked = _share(), now - self._looked, now
        before, self._seen, counted_s = self._seen, {}, -self._spent_s
        for pid in pids:
            clock_s = watch.process_cpu_s(pid)
            counted_s += clock_s + _waited_for_s(pid)
            if pid in before:
                self._observed_s += max(0.0, clock_s - before[pid].clock_s)
                self._seen[pid] = _Seen(clock_s, 0.0)
            else:
                self._observed_s += clock_s
                worth_s = since_s * share * watch.num_runnable(pid) if len(pids) > 1 else 0.0
                self._seen[pid] = _Seen(clock_s, max(0.0, worth_s - clock_s))
        self._observed_s += sum(seen.worth_s for pid, seen in before.items() if pid not in self._seen)
        return self._judge(counted_s)

    def total(self, collected_s: float) -> float:
        """Seconds used in the end, from what process 1 has collected."""
        collected_s = max(0.0, collected_s - self._spent_s)
        return max(collected_s, self._ask(self._meter)) if self._meter is not None else self._judge(collected_s)

    def _ask(self, meter: Meter) -> float:
        self._used_s = max(self._used_s, meter.used_s() - self._metered_from_s)
        return self._used_s

    def _judge(self, counted_s: float) -> float:
        is_evaded = self._observed_s > _FACTOR * counted_s + _MARGIN_S
        self._used_s = max(self._used_s, self._observed_s if is_evaded else counted_s)
        return self._used_s


def _waited_for_s(pid: int) -> float:
    """What the children used that this process has waited for."""
    try:
        fields = procfs.read(pid, "stat").rpartition(b")")[2].split()
        return (int(fields[13]) + int(fields[14])) / _TICKS
    except (OSError, IndexError):
        return 0.0


def _share() -> float:
    """What a runnable thread gets of a processor, as far as the host's queue tells; 0 where it does not."""
    try:
        runnable = int(os.pread(_load[0], 128, 0).split()[3].partition(b"/")[0]) - 1  # without this one
    except (OSError, IndexError, ValueError):
        return 0.0
    return min(1.0, (os.cpu_count() or 1) / max(1, runnable))
