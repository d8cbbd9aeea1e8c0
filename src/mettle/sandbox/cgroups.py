"""A memory cgroup for each machine, where version 2 is delegated to this user: a limit that nothing inside can pass.

The watch of process 1 counts what processes map; memory that only the kernel knows of (a shared mapping that has been
unmapped in part, full pipes and socket buffers) is counted by a cgroup alone. Parts: `CgroupHome` (a pool's directory),
`MachineCgroup`. Invariant: nothing is moved that was there before; where a step fails there is no cgroup, and the
watch goes on as it does beside one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from pathlib import Path
from typing import Final, Self

from mettle.sandbox.zygote.settings import MachineLimits

logger = logging.getLogger(__name__)

_PREFIX: Final = "mettle-"
_SPARE_PROCESSES: Final = 80
_homes = itertools.count()


class MachineCgroup:
    """The cgroup of one machine. Its process 1 enters through `procs`, which the owner has opened for it."""

    def __init__(self, path: Path, limits: MachineLimits) -> None:
        self._path = path
        path.mkdir()
        try:
            # Files of a machine live in memory, and are counted with it.
            (path / "memory.max").write_text(str(limits.memory_bytes + limits.disk_bytes))
            (path / "pids.max").write_text(str(limits.max_processes + _SPARE_PROCESSES))
            if (path / "memory.swap.max").exists():
                (path / "memory.swap.max").write_text("0")
            self.procs = os.open(path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            self.remove()
            raise

    def close_entrance(self) -> None:
        """Process 1 is inside; nobody else follows."""
        if self.procs >= 0:
            os.close(self.procs)
            self.procs = -1

    def is_occupied(self) -> bool:
        """Whether the kernel says that a process is in it."""
        try:
            return bool((self._path / "cgroup.procs").read_text().strip())
        except OSError:
            return False

    def num_killed(self) -> int:
        """How many processes the kernel has ended in it for lack of memory."""
        try:
            lines = (self._path / "memory.events").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def remove(self) -> bool:
        """Delete it; False while there are processes in it."""
        try:
            self._path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class CgroupHome:
    """A pool's directory, in which each machine has its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._leaving: list[MachineCgroup] = []

    @classmethod
    def find(cls, mountinfo: str = "/proc/self/mountinfo", membership: str = "/proc/self/cgroup") -> Self | None:
        """A new directory below the first cgroup that this process may divide, with memory and processes limited."""
        for parent in _candidates(Path(mountinfo), Path(membership)):
            _sweep(parent)
            path = parent / f"{_PREFIX}{os.getpid()}-{next(_homes)}"
            try:
                path.mkdir()
            except OSError:
                continue
            try:
                (path / "cgroup.subtree_control").write_text("+memory +pids")
                return cls(path)
            except OSError as error:
                logger.debug("no memory cgroup below %s: %s", parent, error)
                with contextlib.suppress(OSError):
                    path.rmdir()
        return None

    def make(self, name: str, limits: MachineLimits) -> MachineCgroup:
        """One machine's cgroup. Raises: OSError."""
        self._leaving = [left for left in self._leaving if not left.remove()]
        return MachineCgroup(self._path / name, limits)

    def let_go(self, cgroup: MachineCgroup) -> None:
        """Delete a machine's cgroup, now or when its last process has gone."""
        cgroup.close_entrance()
        if not cgroup.remove():
            self._leaving.append(cgroup)

    def close(self) -> bool:
        """Delete the directory; False while a machine's processes have not all gone."""
        self._leaving = [left for left in self._leaving if not left.remove()]
        with contextlib.suppress(OSError):
            self._path.rmdir()
        return not self._path.exists()


def _candidates(mountinfo: Path, membership: Path) -> list[Path]:
    """This process's own cgroup and the one above, as far as they pass memory on and let this user move processes."""
    mounted = [line.split() for line in mountinfo.read_text().splitlines() if " - cgroup2 " in line]
    joined = [line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")]
    if not mounted or not joined:
        return []
    own = Path(mounted[0][4]) / os.path.relpath(joined[0], mounted[0][3])
    return [path for path in (own, own.parent) if path.is_relative_to(mounted[0][4]) and _is_delegated(path)]


def _is_delegated(path: Path) -> bool:
    try:
        passed_on = (path / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
    return {"memory", "pids"} <= set(passed_on) and all(
        os.access(place, os.W_OK) for place in (path, path / "cgroup.procs")
    )


def _sweep(parent: Path) -> None:
    """Delete what owners that were killed have left: directories without a process."""
    for home in parent.glob(f"{_PREFIX}*"):
        owner = home.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            for path in (*home.glob("*/"), home):
                with contextlib.suppress(OSError):
                    path.rmdir()
