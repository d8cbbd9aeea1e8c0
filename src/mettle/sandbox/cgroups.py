"""A cgroup for each machine, where version 2 may be divided by this user: limits that nothing inside can pass.

The watch of process 1 counts what processes map, and sockets; a cgroup counts everything, pipes and page tables too,
and ends all that is in it by one write. A cell gets one where nothing else counts its processor time.
Parts: `find_home`, `CgroupHome` (a pool's directory), `MachineCgroup`, `CellCgroup`, `Absence` (why there is none).
Which limits there are is up to the host: `controllers` are those that it passes on.
Invariant: nothing is moved that was there before; where a step fails there is no cgroup, and the watch goes on as it
does beside one. What a killed owner leaves is ended and removed by its warden, and by the next home beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from mettle.sandbox.zygote.settings import MachineLimits

logger = logging.getLogger(__name__)

CONTROLLERS: Final = ("memory", "pids", "cpu")
_PREFIX: Final = "mettle-"
_SPARE_PROCESSES: Final = 80
_CPU_PERIOD_US: Final = 100_000
_MAX_REMOVALS: Final = 50
_REMOVAL_PAUSE_S: Final = 0.02
# Waits for the end of its input, which is the end of the owner, then ends and removes what is left. $1: the directory.
_WARDEN: Final = """
exec 3<&0
( read -r _ <&3
  for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    [ -d "$1" ] || exit 0
    echo 1 >"$1/cgroup.kill"; rmdir "$1"/*/ "$1"; sleep 0.1
  done ) >/dev/null 2>&1 &
"""
_homes = itertools.count()


class Absence(NamedTuple):
    """Why there are no cgroups for machines, or not all of their limits, and what would help."""

    why: str
    fix: str


class CellCgroup:
    """The cgroup of one cell, without limits: its process 1 enters through `procs` and reads what all have used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir()
        opened: list[int] = []
        try:
            opened.append(os.open(path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
            opened.append(os.open(path / "cpu.stat", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            self.remove()
            raise
        self.entrances = tuple(opened)

    def close_entrances(self) -> None:
        """The cell has its own copies."""
        for descriptor in self.entrances:
            os.close(descriptor)
        self.entrances = ()

    def remove(self) -> bool:
        """Delete it; False while there are processes in it."""
        return _remove(self._path)


class MachineCgroup:
    """The cgroup of one machine. Its process 1 enters through `procs`, which the owner has opened for it."""

    def __init__(self, path: Path, limits: MachineLimits, controllers: Collection[str] = CONTROLLERS) -> None:
        self._path = path
        path.mkdir()
        try:
            if "memory" in controllers:
                # Files of a machine live in memory, and are counted with it.
                (path / "memory.max").write_text(str(limits.memory_bytes + limits.disk_bytes))
                if (path / "memory.swap.max").exists():
                    (path / "memory.swap.max").write_text("0")
            if "pids" in controllers:
                (path / "pids.max").write_text(str(limits.max_processes + _SPARE_PROCESSES))
            if "cpu" in controllers and limits.num_cpus:
                (path / "cpu.max").write_text(f"{int(limits.num_cpus * _CPU_PERIOD_US)} {_CPU_PERIOD_US}")
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

    def kill(self) -> None:
        """End everything in it at once, whatever it is doing."""
        with contextlib.suppress(OSError):
            (self._path / "cgroup.kill").write_text("1")

    def num_killed(self) -> int:
        """How many processes the kernel has ended in it for lack of memory."""
        try:
            lines = (self._path / "memory.events").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def remove(self) -> bool:
        """Delete it; False while there are processes in it."""
        return _remove(self._path)


def _remove(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


class CgroupHome:
    """A pool's directory, in which each machine or cell has its own. Raises: OSError if it cannot be made."""

    def __init__(self, path: Path, controllers: Collection[str]) -> None:
        self._path = path
        self._leaving: list[MachineCgroup | CellCgroup] = []
        self._num_cells = 0
        self.controllers = frozenset(controllers)
        path.mkdir()
        try:
            if controllers:
                (path / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(controllers)))
            self._lifeline = _post_warden(path)
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise

    def make(self, name: str, limits: MachineLimits) -> MachineCgroup:
        """One machine's cgroup. Raises: OSError."""
        return MachineCgroup(self._path / name, limits, self.controllers)

    def make_for_cell(self) -> CellCgroup:
        """A cell's cgroup; what earlier cells have left is deleted on the way. Raises: OSError."""
        self.tidy()
        self._num_cells += 1
        return CellCgroup(self._path / f"c-{self._num_cells}")

    def let_go_of_cell(self, cgroup: CellCgroup) -> None:
        """Its owner has hung up, so that its processes end; delete it when they have."""
        cgroup.close_entrances()
        self._leaving.append(cgroup)

    def let_go(self, cgroup: MachineCgroup) -> None:
        """End and delete a machine's cgroup, now or when its last process has gone."""
        cgroup.close_entrance()
        if not cgroup.remove():
            cgroup.kill()
            self._leaving.append(cgroup)

    def tidy(self) -> bool:
        """Delete what was let go of; False while processes of it have not all gone."""
        self._leaving = [left for left in self._leaving if not left.remove()]
        return not self._leaving

    def close(self) -> bool:
        """Delete the directory; False while a machine's processes have not all gone."""
        self.tidy()
        with contextlib.suppress(OSError):
            self._path.rmdir()
        if self._path.exists():
            return False
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return True

    async def remove(self) -> None:
        """Delete the directory as soon as everything in it has ended, which does not take long."""
        for _ in range(_MAX_REMOVALS):
            if self.close():
                return
            await asyncio.sleep(_REMOVAL_PAUSE_S)


def _post_warden(path: Path) -> int:
    """Start a process that outlives this one and tidies up after it; its life hangs on the descriptor returned."""
    waits, lifeline = os.pipe()
    command = ["/bin/sh", "-c", _WARDEN, "sh", str(path)]
    environment = {"PATH": "/usr/bin:/bin"}
    try:
        subprocess.run(command, stdin=waits, check=True, start_new_session=True, env=environment)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nobody will tidy up %s should this process be killed: %s", path, error)
    finally:
        os.close(waits)
    return lifeline


def find_home(mountinfo: str = "/proc/self/mountinfo", membership: str = "/proc/self/cgroup") -> CgroupHome | Absence:
    """A new directory in the cgroup that this process may divide and that passes on most of the controllers.

    That is its own or the one above. Without any controller there is still the one write that ends a whole machine.
    """
    mounts = [line.split() for line in Path(mountinfo).read_text().splitlines() if " - cgroup2 " in line]
    joined = [line[3:] for line in Path(membership).read_text().splitlines() if line.startswith("0::")]
    if not mounts or not joined:
        return Absence("cgroup version 2 is not mounted here", "boot with systemd.unified_cgroup_hierarchy=1")
    top = Path(mounts[0][4])
    own = top / os.path.relpath(joined[0], mounts[0][3])
    candidates = [path for path in (own, own.parent) if path.is_relative_to(top)]
    open_ones = [path for path in candidates if _may_divide(path)]
    for parent in sorted(open_ones, key=lambda path: -len(_passed_on(path))):
        _sweep(parent)
        with contextlib.suppress(OSError):
            return CgroupHome(parent / f"{_PREFIX}{os.getpid()}-{next(_homes)}", _passed_on(parent))
    return explain(top, own, can_divide=bool(open_ones))


def explain(top: Path, own: Path, *, can_divide: bool) -> Absence:
    """Why the kernel holds machines to fewer limits than it could, from the directories that decide it."""
    absent = [name for name in CONTROLLERS if name not in _words(top / "cgroup.controllers")]
    scope = "systemd-run --scope" if os.geteuid() == 0 else "systemd-run --user --scope"
    reasons: list[Absence] = []
    if not can_divide:
        fix = f"start it by `{scope} -p Delegate=yes mettle ...`, or in a service with Delegate=yes"
        reasons.append(Absence(f"user {os.geteuid()} may not divide {own} nor the cgroup above it", fix))
    if absent:
        why = f"cgroup version 2 has no {', '.join(absent)} on this host"
        reasons.append(Absence(why, "boot with systemd.unified_cgroup_hierarchy=1 or cgroup_no_v1=all"))
    if not reasons:
        fix = f"start it by `{scope} -p Delegate=yes mettle ...`, where all of {', '.join(CONTROLLERS)} are delegated"
        reasons.append(Absence(f"neither {own} nor the cgroup above it passes on {', '.join(CONTROLLERS)}", fix))
    return Absence("; ".join(reason.why for reason in reasons), ", and ".join(reason.fix for reason in reasons))


def why_incomplete(home: CgroupHome, mountinfo: str = "/proc/self/mountinfo") -> Absence:
    """Why a home lacks some of the controllers."""
    mounts = [line.split() for line in Path(mountinfo).read_text().splitlines() if " - cgroup2 " in line]
    return explain(Path(mounts[0][4]), home._path.parent, can_divide=True)


def _passed_on(path: Path) -> list[str]:
    return [name for name in CONTROLLERS if name in _words(path / "cgroup.subtree_control")]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _may_divide(path: Path) -> bool:
    return all(os.access(place, os.W_OK) for place in (path, path / "cgroup.procs"))


def _sweep(parent: Path) -> None:
    """End and delete what owners that were killed have left."""
    for home in parent.glob(f"{_PREFIX}*"):
        owner = home.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):
                (home / "cgroup.kill").write_text("1")
            for path in (*home.glob("*/"), home):
                with contextlib.suppress(OSError):
                    path.rmdir()
