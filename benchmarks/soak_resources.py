"""What a pool's owner and everything below it hold at one moment, counted from the outside, by the kernel's own books.

Roles: the owner (this process), the templates, the cells and machines (all that templates have below them). Memory is
anonymous and shared memory only, so that a neighbour who loads or drops the same library changes nothing; in a sum, a
page that several processes share counts once. Invariant: a process that ends while it is looked at counts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mettle.sandbox.zygote import kernel, watch

_MB = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class ResourceCount:
    """Counts what belongs to this process. `folder` is where its pools keep their files."""

    folder: Path
    mountinfo: Path = Path("/proc/self/mountinfo")
    cgroup_root: Path = _CGROUP_ROOT
    own_pid: int = field(default_factory=os.getpid)

    def take(self, templates: Collection[int], machines: Iterable[int] = ()) -> dict[str, float]:
        """Every quantity by its name. `machines` are processes 1 of machines whose mounts are counted, too."""
        family = watch.live_descendants(self.own_pid)
        cells = [pid for pid in family if any(a in templates for a in watch.ancestors(pid))]
        everybody = [self.own_pid, *family]
        found = {
            "memory of the owner, MB": _anonymous_mb(self.own_pid),
            "memory of the templates, MB": sum(map(_anonymous_mb, templates)),
            "memory of cells and machines, MB": sum(map(_proportional_mb, cells)),
            "memory of all, MB": sum(map(_proportional_mb, everybody)),
            "resident memory of all, MB": sum(watch.process_resident_bytes(pid) for pid in everybody) / _MB,
            "objects of the owner, thousands": sys.getallocatedblocks() / 1000,
            "descriptors of the owner": _num_descriptors(self.own_pid),
            "descriptors of the templates": sum(map(_num_descriptors, templates)),
            "descriptors of cells and machines": sum(map(_num_descriptors, cells)),
            "processes": len(family),
            "threads of the owner": len(_names(f"/proc/{self.own_pid}/task")),
            "tasks of the owner": len(asyncio.all_tasks()),
            "mounts of the owner": _num_lines(self.mountinfo),
            "mounts in templates": sum(_num_lines(Path(f"/proc/{pid}/mountinfo")) for pid in templates),
            "mounts in machines": sum(_num_lines(Path(f"/proc/{pid}/mountinfo")) for pid in machines),
            "files in templates": sum(map(_num_inodes, templates)),
            "cgroups": self.num_cgroups(),
            "files of the pools": sum(len(below) + len(files) for _, below, files in os.walk(self.folder)),
        }
        for kind in ("mnt", "net", "pid", "user", "ipc"):
            found[f"{kind} namespaces"] = len({_link(pid, kind) for pid in everybody} - {""})
        return found

    def num_cgroups(self) -> int:
        """Directories of this process's pools in any hierarchy, and what is below them."""
        mark = f"/mettle-{self.own_pid}-"
        return sum(mark in folder for folder, _, _ in os.walk(self.cgroup_root))  # it passes over what vanishes


def adopt_orphans() -> None:
    """Whatever loses its parent below this process becomes its child, so that no survivor escapes the count."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot adopt orphans")


def take_own_mounts() -> None:
    """A private copy of the mount table, so that a neighbour's mounts are not counted; only root may have one."""
    if os.geteuid() == 0:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)


def bury_orphans() -> int:
    """Collect the adopted that have ended; only where no other child of this process is about to be waited for."""
    num_buried = 0
    for pid in watch.descendants(os.getpid()):
        if watch.ancestors(pid)[:1] == [os.getpid()]:
            with contextlib.suppress(OSError):
                num_buried += os.waitpid(pid, os.WNOHANG)[0] != 0
    return num_buried


async def settle(*, quiet_s: float = 0.4, limit_s: float = 15.0) -> bool:
    """Wait until the same processes have been there for a while; whether that came in time."""
    clock = asyncio.get_running_loop().time
    deadline, since, before = clock() + limit_s, clock(), set[int]()
    while clock() < deadline:
        bury_orphans()
        present = set(watch.live_descendants(os.getpid()))
        if present != before:
            since, before = clock(), present
        elif clock() - since >= quiet_s:
            gc.collect()
            return True
        await asyncio.sleep(0.05)
    return False


def _rollup(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _anonymous_mb(pid: int) -> float:
    return _rollup(pid).get("Anonymous", 0) / _MB


def _proportional_mb(pid: int) -> float:
    sizes = _rollup(pid)
    return (sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)) / _MB


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _num_descriptors(pid: int) -> int:
    return len(_names(f"/proc/{pid}/fd"))


def _num_lines(path: Path) -> int:
    try:
        return len(path.read_text().splitlines())
    except OSError:
        return 0


def _num_inodes(pid: int) -> int:
    """Files in the root of a template, which is a file system of its own."""
    try:
        found = os.statvfs(f"/proc/{pid}/root")
    except OSError:
        return 0
    return found.f_files - found.f_ffree


def _link(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""
