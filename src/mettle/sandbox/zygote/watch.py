"""What the processes of one test have used so far, asked by process 1 while they run.

In a cell every process but process 1 belongs to the test. Without a jail the test is the tree below its first process.
Invariant: memory that a process shares with the template it was forked from is counted once; memory that no process
maps (`kernel_memory.py`) is counted too.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from typing import Final

from mettle.sandbox.zygote import kernel_memory, procfs
from mettle.sandbox.zygote.pss import ProportionalSizes

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_CPUCLOCK_SCHED: Final = 2
_NUM_LOOKS: Final = 3
_PF_EXITING: Final = 0x4  # of the flags in a thread's `stat`
_sizes: Final = ProportionalSizes()  # of the one cell or machine that this process is process 1 of


def process_cpu_s(pid: int) -> float:
    """Processor time of one live process, all its threads; 0 if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def process_resident_bytes(pid: int) -> int:
    """Resident memory of one process; 0 if it is gone or /proc is not there."""
    try:
        return int(procfs.read(pid, "statm", 64).split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def resident_bytes(pids: list[int], inherited_bytes: int) -> int:
    """Of all processes of a test together; `inherited_bytes` is what each fork of the template starts with."""
    own_bytes = [max(0, process_resident_bytes(pid) - inherited_bytes) for pid in pids]
    return inherited_bytes + sum(own_bytes) + hidden_bytes(pids)


def tree_bytes(directory: str, pid: int) -> int:
    """What the files below a directory take, and those that a process has open and deleted; their number is limited."""
    total = _deleted_bytes(pid)
    with contextlib.suppress(OSError):
        for _, names, files, descriptor in os.fwalk(directory):
            for name in (*names, *files):
                with contextlib.suppress(OSError):
                    total += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks * 512
    return total


def _deleted_bytes(pid: int) -> int:
    """Only one that is ending cannot be looked into: its filter lets it not close itself."""
    found: dict[tuple[int, int], int] = {}
    try:
        names = procfs.descriptors(pid)
    except OSError:
        return 0
    for name in names:
        with contextlib.suppress(OSError):
            file = os.stat(f"/proc/{pid}/fd/{name}")
            if stat.S_ISREG(file.st_mode) and file.st_nlink == 0:
                found[file.st_dev, file.st_ino] = file.st_blocks * 512
    return sum(found.values())


def hidden_bytes(pids: list[int]) -> int:
    """What these processes hold without having it mapped."""
    return sum(kernel_memory.table_bytes(pids).values()) + kernel_memory.stream_bytes(pids)


def cell_processes() -> list[int]:
    """Every process that this cell's /proc shows, except process 1."""
    return [pid for pid in procfs.processes() if pid != 1]


def descendants(ancestor: int) -> list[int]:
    """The live processes below one, found through /proc."""
    children: dict[int, list[int]] = {}
    for pid in procfs.processes():
        children.setdefault(procfs.state_and_parent(pid)[1], []).append(pid)
    found: list[int] = []
    waiting = [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def is_runnable(pids: list[int]) -> bool:
    """Whether a thread of these runs, or would if it were given a processor."""
    return any(_state_of_task(pid, task) == b"R" for pid in pids for task in procfs.tasks(pid))


def num_runnable(pid: int) -> int:
    """How many threads of this one run, or would."""
    return sum(_state_of_task(pid, task) == b"R" for task in procfs.tasks(pid))


def _state_of_task(pid: int, task: str) -> bytes:
    try:
        return procfs.read(pid, f"task/{task}/stat").rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b"X"


def is_ending(pid: int) -> bool:
    """Whether a process has begun to end: before it can be collected, its descriptors are closed already."""
    return all(_flags_of_task(pid, task) & _PF_EXITING for task in procfs.tasks(pid))


def _flags_of_task(pid: int, task: str) -> int:
    try:
        return int(procfs.read(pid, f"task/{task}/stat").rpartition(b")")[2].split()[6])
    except (OSError, IndexError):
        return _PF_EXITING


def live_descendants(ancestor: int) -> list[int]:
    """The processes below one that still run: those that have ended and wait to be collected are left out.

    A process whose first thread has ended looks like one that waits to be collected, while its other threads go on and
    its descriptors are open.
    """
    for _ in range(1 if procfs.is_own() else _NUM_LOOKS):
        # A walk from parent to child can miss what changes its parent at that moment.
        found = [pid for pid in descendants(ancestor) if not _has_ended(pid)]
        if found:
            return found
    return []


def _has_ended(pid: int) -> bool:
    is_first_over = procfs.state_and_parent(pid)[0] in "ZX"
    return is_first_over and all(_state_of_task(pid, task) in (b"Z", b"X") for task in procfs.tasks(pid))


def ancestors(pid: int) -> list[int]:
    """The processes above one, nearest first."""
    found: list[int] = []
    while (pid := procfs.state_and_parent(pid)[1]) > 0:
        found.append(pid)
    return found


def proportional_bytes(pids: Sequence[int]) -> dict[int, int]:
    """Resident memory of each process, pages that several share divided among them.

    The kernel walks the page tables for it, so it is asked only when the quick sum is over a limit.
    """
    return _sizes.sizes({pid: process_resident_bytes(pid) for pid in pids})
