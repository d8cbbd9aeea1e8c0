"""What this host has: all memory that this process may use, what is free of it now, and cores.

A container has less than its host: the limits of the memory cgroups above this process count, whichever is least.
Invariant: a figure that cannot be read is None, and then nothing is refused for it.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CPUINFO: Final = Path("/proc/cpuinfo")
_OWN_GROUP: Final = Path("/proc/self/cgroup")
_OWN_THREADS: Final = Path("/proc/self/task")
_GROUPS: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 1 << 60


def total_memory_mb() -> int | None:
    """The memory of the host, or of the container that this is."""
    return _mebibytes(_least("MemTotal", [limit for limit, _ in _group_limits()]))


def free_memory_bytes() -> int | None:
    """What can be taken anew without anything being ended for it."""
    return _least("MemAvailable", [max(0, limit - used) for limit, used in _group_limits()])


def free_memory_mb() -> int | None:
    """The same in MiB."""
    return _mebibytes(free_memory_bytes())


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_GROUPS / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def waits_for_cores_s() -> dict[str, float] | None:
    """Seconds that each thread of this process stood ready to run while others had the cores, by its id; None where the
    kernel doesn't say."""
    waits: dict[str, float] = {}
    try:
        threads = list(_OWN_THREADS.iterdir())
    except OSError:
        return None
    for thread in threads:
        with suppress(OSError):  # a thread that has ended meanwhile
            waits[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return waits or None


def release_freed_memory() -> None:
    """Give memory that was freed back to the system. glibc keeps blocks of up to 32 MiB for later, which after weights
    have been read and rearranged is a third of their size. Where the C library cannot, nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16 numbers."""
    try:
        flags = set(re.findall(r"\w+", _CPUINFO.read_text()))
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _least(name: str, limits: list[int]) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    figures = [*limits, *([int(found[1]) << 10] if found else [])]
    return min(figures, default=None)


def _mebibytes(number: int | None) -> int | None:
    return None if number is None else number >> 20


def _group_limits() -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each memory cgroup with a limit, from this process's own up."""
    try:
        own = re.search(r"^0::(/.*)$", _OWN_GROUP.read_text(), re.MULTILINE)
    except OSError:
        own = None
    path = _GROUPS / (own[1].lstrip("/") if own else "")
    for folder in (path, *path.parents):
        if not folder.is_relative_to(_GROUPS):
            return
        try:
            limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        except OSError:
            continue
        if limit.isdigit() and int(limit) < _NO_LIMIT:
            # Pages of files are given back when they are wanted, so that only what is left counts as used.
            yield int(limit), max(0, int(used) - _given_back(folder))


def _given_back(folder: Path) -> int:
    try:
        found = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
