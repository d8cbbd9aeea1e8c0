"""The files that the kernel keeps on each process, by the number that the process has here.

Normally that is this namespace's own /proc. Where the host forbids one (containers that mask parts of /proc do), the
code inside gets none, and process 1 keeps a descriptor of the host's from before it was covered (`keep`): there the
same processes have other numbers, which each process's status tells (`NSpid`).
Invariant: the descriptor is process 1's alone; it is closed before anything of the code's runs, and every function
here takes and gives numbers of this namespace, for processes of this namespace.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from typing import Final

_STATUS_BYTES: Final = 4096
_CHILDREN_BYTES: Final = 1 << 16
_kept: list[int] = []  # the descriptor of the host's /proc, if that is what there is
_outer: dict[int, int] = {}  # number here -> number there
_has_lists: list[bool] = []  # whether its kernel lists the children of a thread


def keep(directory: str) -> None:
    """Look at processes through this /proc of an outer namespace, whatever is mounted over it afterwards."""
    _kept[:] = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    _has_lists[:] = [os.path.exists(f"{directory}/thread-self/children")]


def is_own() -> bool:
    """Whether the code sees the same /proc."""
    return not _kept


def read(pid: int | str, name: str, num_bytes: int = 1 << 16) -> bytes:
    """One file of a process (or of "self"). OSError if the process is gone, or there is no /proc."""
    descriptor = open_file(pid, name)
    try:
        return os.read(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def open_file(pid: int | str, name: str) -> int:
    """A descriptor of one file of a process. OSError if the process is gone, or there is no /proc."""
    return _open(f"{_number(pid)}/{name}", os.O_RDONLY)


def num_lines(pid: int, name: str, max_s: float) -> int:
    """How many lines a file of a process has, however long it is. TimeoutError if the kernel is slow to tell."""
    descriptor = open_file(pid, name)
    try:
        until, number = time.monotonic() + max_s, 0
        while piece := os.read(descriptor, 1 << 16):
            number += piece.count(b"\n")
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, f"process {pid}'s {name}")
        return number
    finally:
        os.close(descriptor)


def tasks(pid: int) -> list[str]:
    """The threads of a process, as `read` takes them after "task/"; none if the process is gone."""
    try:
        directory = _open(f"{_number(pid)}/task", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return []
    try:
        return os.listdir(directory)
    finally:
        os.close(directory)


def descriptors(pid: int) -> list[str]:
    """The names of the descriptors that a process has open."""
    directory = _open(f"{_number(pid)}/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return os.listdir(directory)
    finally:
        os.close(directory)


def num_descriptors(pid: int) -> int:
    """The size of that directory, which says how many there are since Linux 6.2; 0 before."""
    path = f"{_number(pid)}/fd"
    return (os.stat(path, dir_fd=_kept[0]) if _kept else os.stat(f"/proc/{path}")).st_size


def target(pid: int, descriptor: str) -> str:
    """What a descriptor of a process is open on."""
    path = f"{_number(pid)}/fd/{descriptor}"
    return os.readlink(path, dir_fd=_kept[0]) if _kept else os.readlink(f"/proc/{path}")


def processes() -> list[int]:
    """Every live process of this namespace, process 1 included (of an ordinary /proc: all that it shows)."""
    if _kept:
        _outer.clear()
        _outer.update(_find_all())
        return list(_outer)
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def state_and_parent(pid: int) -> tuple[str, int]:
    """A process that is gone is dead and has no parent; nor has process 1, which has it elsewhere."""
    try:
        fields = read(pid, "stat", _STATUS_BYTES).rpartition(b")")[2].split()
        parent = int(fields[1])
    except (OSError, IndexError):
        return "X", 0
    if _kept:
        parent = next((inner for inner, outer in _outer.items() if outer == parent), 0)
    return fields[0].decode(), parent


def _number(pid: int | str) -> int | str:
    if not _kept or isinstance(pid, str):
        return pid
    if pid not in _outer:
        processes()
    if pid not in _outer:
        raise ProcessLookupError(3, f"no process {pid}")
    return _outer[pid]


def _open(path: str, flags: int) -> int:
    # No file objects: every waiting cell has come through here once, and each page that it writes to is its own.
    if _kept:
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=_kept[0])
    return os.open(f"/proc/{path}", flags | os.O_CLOEXEC)


def _find_all() -> Iterator[tuple[int, int]]:
    """Number here and there of each process below process 1, which is every process of its namespace."""
    waiting = [int(os.readlink("self", dir_fd=_kept[0]))]
    children = _children if _has_lists[0] else _scan().get
    while waiting:
        outer = waiting.pop()
        try:
            waiting += children(outer) or []
            status = _read_outer(f"{outer}/status", _STATUS_BYTES)
        except OSError:
            continue
        line = next((line for line in status.splitlines() if line.startswith(b"NSpid:")), b"NSpid:")
        numbers = line.split()[1:]
        if len(numbers) > 1:
            yield int(numbers[-1]), outer


def _children(outer: int) -> list[int]:
    found: list[int] = []
    directory = _open(f"{outer}/task", os.O_RDONLY | os.O_DIRECTORY)
    try:
        threads = os.listdir(directory)
    finally:
        os.close(directory)
    for thread in threads:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, _read_outer(f"{outer}/task/{thread}/children", _CHILDREN_BYTES).split())
    return found


def _scan() -> dict[int, list[int]]:
    """The children of every process of the host: slow where there are many, and needed where no kernel lists them."""
    found: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir(_kept[0])):
        with contextlib.suppress(OSError, IndexError):
            fields = _read_outer(f"{name}/stat", _STATUS_BYTES).rpartition(b")")[2].split()
            found.setdefault(int(fields[1]), []).append(int(name))
    return found


def _read_outer(path: str, num_bytes: int) -> bytes:
    descriptor = _open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, num_bytes)
    finally:
        os.close(descriptor)
