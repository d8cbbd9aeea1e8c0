"""What the processes of one test have used so far, asked by process 1 while they run.

In a cell every process but process 1 belongs to the test. Without a jail the test is the tree below its first process.
Invariant: memory that a process shares with the template it was forked from is counted once; memory that no process
maps (`unmapped.py`) is counted too.
"""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple

from mettle.sandbox.zygote import unmapped

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_CPUCLOCK_SCHED: Final = 2


class Usage(NamedTuple):
    """Processor seconds of live processes, and resident bytes of all of them together."""

    cpu_s: float
    resident_bytes: int


def process_cpu_s(pid: int) -> float:
    """Processor time of one live process, all its threads; 0 if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def process_resident_bytes(pid: int) -> int:
    """Resident memory of one process; 0 if it is gone or /proc is not there."""
    try:
        file = os.open(f"/proc/{pid}/statm", os.O_RDONLY)  # no file object: every waiting cell has done this once
    except OSError:
        return 0
    try:
        return int(os.read(file, 64).split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0
    finally:
        os.close(file)


def measure(first_pid: int, inherited_bytes: int, *, is_jailed: bool) -> Usage:
    """Add up the test's live processes; `inherited_bytes` is what each fork of the template starts with."""
    pids = cell_processes() if is_jailed else [first_pid, *descendants(first_pid)]
    cpu_s = sum(process_cpu_s(pid) for pid in pids or [first_pid])
    own_bytes = [max(0, process_resident_bytes(pid) - inherited_bytes) for pid in pids]
    return Usage(cpu_s, inherited_bytes + sum(own_bytes) + hidden_bytes(pids))


def hidden_bytes(pids: list[int]) -> int:
    """What these processes hold without having it mapped."""
    return sum(unmapped.page_table_bytes(pid) for pid in pids) + unmapped.stream_bytes(pids)


def cell_processes() -> list[int]:
    """Every process that this cell's /proc shows, except process 1."""
    return [pid for pid in _all_processes() if pid != 1]


def descendants(ancestor: int) -> list[int]:
    """The live processes below one, found through /proc."""
    children: dict[int, list[int]] = {}
    for pid in _all_processes():
        children.setdefault(_parent_of(pid), []).append(pid)
    found: list[int] = []
    waiting = [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def is_runnable(pids: list[int]) -> bool:
    """Whether a thread of these runs, or would if it were given a processor."""
    return any(_state_of_task(pid, task) == "R" for pid in pids for task in _tasks(pid))


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _state_of_task(pid: int, task: str) -> str:
    try:
        with open(f"/proc/{pid}/task/{task}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"


def live_descendants(ancestor: int) -> list[int]:
    """The processes below one that still run: those that have ended and wait to be collected are left out."""
    return [pid for pid in descendants(ancestor) if _stat_of(pid)[0] not in "ZX"]


def ancestors(pid: int) -> list[int]:
    """The processes above one, nearest first."""
    found: list[int] = []
    while (pid := _parent_of(pid)) > 0:
        found.append(pid)
    return found


def proportional_bytes(pid: int) -> int:
    """Resident memory of one process, each shared page divided among those that share it.

    The kernel walks the page table for it, so it is asked only when the quick sum is over a limit.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return process_resident_bytes(pid)


def _all_processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _parent_of(pid: int) -> int:
    return int(_stat_of(pid)[1])


def _stat_of(pid: int) -> tuple[str, str]:
    """State and parent; a process that is gone is dead and has none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), fields[1].decode()
    except (OSError, IndexError):
        return "X", "0"
