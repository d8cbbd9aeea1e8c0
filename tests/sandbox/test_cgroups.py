"""Cgroups: where one may be made, what is written, what is swept and by whom.

On a tree of plain files, which stands for hosts with other controllers than this one; on the kernel's own hierarchy as
far as this user may divide it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from owners import ENVIRONMENT, is_alive, wait_until

from mettle.errors import UserError
from mettle.sandbox import MachineConfig, MachinePool, SandboxConfig
from mettle.sandbox.cgroups import Absence, CgroupHome, MachineCgroup, find_home

LIMITS = MachineConfig(memory_mb=100, disk_mb=28, max_processes=20).limits()


class Tree:
    """A cgroup2 mount made of files: `/slice` may be divided or not, and this process is in `/slice/own`."""

    def __init__(self, root: Path, passed_on: str, controllers: str = "cpu memory pids") -> None:
        self.top = root / "cg"
        self.slice = self.top / "slice"
        (self.slice / "own").mkdir(parents=True)
        (self.top / "cgroup.controllers").write_text(controllers)
        (self.slice / "cgroup.subtree_control").write_text(passed_on)
        (self.slice / "own" / "cgroup.subtree_control").write_text("")
        (self.slice / "cgroup.procs").write_text("")
        self.mountinfo, self.membership = root / "mountinfo", root / "membership"
        self.mountinfo.write_text(f"30 1 0:26 / {root}/cg rw,nosuid - cgroup2 cgroup2 rw\n")
        self.membership.write_text("4:memory:/elsewhere\n0::/slice/own\n")

    def find(self) -> CgroupHome | Absence:
        return find_home(str(self.mountinfo), str(self.membership))


@pytest.fixture
def _kernel_makes_files(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def mkdir(path: Path, *args: object, **kwargs: object) -> None:
        real(path)
        for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max", "cgroup.procs", "cgroup.kill"):
            (path / name).write_text("")

    monkeypatch.setattr(Path, "mkdir", mkdir)


@pytest.fixture
def real() -> Iterator[Path]:
    """A directory of the kernel's own hierarchy, whatever its controllers."""
    found = find_home()
    if isinstance(found, Absence):
        pytest.skip(f"no cgroup of version 2 may be divided by this user: {found.why}")
    parent = found._path.parent
    assert found.close()
    path = parent / f"mettle-{os.getpid()}-test"
    yield path
    assert not path.exists(), "each test removes what it made"


def sleepers_in(cgroup: Path) -> subprocess.Popen[bytes]:
    """A process that enters a cgroup, with a child, and ignores what it is asked."""
    script = 'echo 0 >"$1"/cgroup.procs; trap "" TERM HUP; sleep 300 & wait; sleep 300'
    return subprocess.Popen(["sh", "-c", script, "sh", str(cgroup)])


def test_a_home_is_made_beside_this_process_with_what_is_passed_on(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "cpu memory pids")
    home = tree.find()
    assert isinstance(home, CgroupHome)
    assert home.controllers == {"memory", "pids", "cpu"}
    [made] = tree.slice.glob("mettle-*")
    assert made.name.startswith(f"mettle-{os.getpid()}-")
    assert (made / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


@pytest.mark.parametrize("passed_on", ["", "pids", "memory"])
def test_a_home_has_no_more_controllers_than_are_passed_on(tmp_path: Path, passed_on: str) -> None:
    home = Tree(tmp_path, passed_on).find()
    assert isinstance(home, CgroupHome)
    assert home.controllers == set(passed_on.split())


@pytest.mark.parametrize(
    ("prepare", "why", "fix"),
    [
        (lambda tree: tree.mountinfo.write_text(""), "not mounted", "unified_cgroup_hierarchy"),
        (lambda tree: tree.membership.write_text("4:memory:/elsewhere\n"), "not mounted", "unified_cgroup_hierarchy"),
        (lambda tree: (tree.slice / "cgroup.procs").unlink(), "may not divide", "Delegate=yes"),
        (
            lambda tree: [
                (tree.slice / "cgroup.procs").unlink(),
                (tree.top / "cgroup.controllers").write_text("hugetlb"),
            ],
            "no memory, pids, cpu on this host",
            "cgroup_no_v1",
        ),
    ],
)
def test_a_host_without_cgroups_for_machines_is_told_why(
    tmp_path: Path, prepare: Callable[[Tree], object], why: str, fix: str
) -> None:
    tree = Tree(tmp_path, "memory pids")
    prepare(tree)
    found = tree.find()
    assert isinstance(found, Absence)
    assert why in found.why
    assert fix in found.fix


@pytest.mark.usefixtures("_kernel_makes_files")
def test_a_machine_gets_memory_for_its_processes_and_its_files_and_its_share_of_processors(tmp_path: Path) -> None:
    made = MachineCgroup(tmp_path / "m", LIMITS._replace(num_cpus=1.5))
    assert (tmp_path / "m" / "memory.max").read_text() == str(128 << 20)
    assert (tmp_path / "m" / "memory.swap.max").read_text() == "0"
    assert (tmp_path / "m" / "cpu.max").read_text() == "150000 100000"
    assert int((tmp_path / "m" / "pids.max").read_text()) >= 20
    os.write(made.procs, b"0")
    made.close_entrance()
    made.close_entrance()
    assert made.is_occupied()
    assert made.num_killed() == 0
    (tmp_path / "m" / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert made.num_killed() == 2
    made.kill()
    assert (tmp_path / "m" / "cgroup.kill").read_text() == "1"


@pytest.mark.usefixtures("_kernel_makes_files")
def test_nothing_is_written_for_a_controller_that_is_not_there(tmp_path: Path) -> None:
    MachineCgroup(tmp_path / "m", LIMITS._replace(num_cpus=1.5), ("pids",)).close_entrance()
    assert (tmp_path / "m" / "pids.max").read_text() != ""
    assert (tmp_path / "m" / "memory.max").read_text() == (tmp_path / "m" / "cpu.max").read_text() == ""


def test_what_a_killed_owner_left_is_swept_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "memory pids")
    dead, alive = tree.slice / "mettle-999999999-0", tree.slice / f"mettle-{os.getppid()}-0"
    for home in (dead, alive):
        (home / "m-1").mkdir(parents=True)
    assert isinstance(tree.find(), CgroupHome)
    assert not (dead / "m-1").exists()
    assert (alive / "m-1").exists()


async def test_one_write_ends_everything_in_a_real_cgroup(real: Path) -> None:
    home = CgroupHome(real, ())
    made = home.make("m", LIMITS)
    with sleepers_in(real / "m") as sleeper:
        await wait_until(lambda: len((real / "m" / "cgroup.procs").read_text().split()) == 2)
        assert not made.remove()
        home.let_go(made)
        assert sleeper.wait(5) == -signal.SIGKILL
    await wait_until(home.close)


async def test_a_real_cgroup_of_a_killed_owner_is_ended_and_removed_by_its_warden(real: Path) -> None:
    code = (
        "import sys, time, subprocess\nfrom pathlib import Path\n"
        "from mettle.sandbox import MachineConfig\nfrom mettle.sandbox.cgroups import CgroupHome\n"
        "home = CgroupHome(Path(sys.argv[1]), ())\nmade = home.make('m', MachineConfig().limits())\n"
        "script = f'echo 0 >/proc/self/fd/{made.procs}; trap \"\" TERM; sleep 300'\n"
        "subprocess.Popen(['setsid', 'sh', '-c', script], pass_fds=[made.procs])\nprint('ready', flush=True)\ntime.sleep(300)\n"
    )
    owner = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", code, str(real)], stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        await wait_until(lambda: bool((real / "m" / "cgroup.procs").read_text()))
        survivors = [int(pid) for pid in (real / "m" / "cgroup.procs").read_text().split()]
        owner.kill()
    await wait_until(lambda: not real.exists())
    assert not any(is_alive(pid) for pid in survivors)


async def test_a_real_cgroup_that_a_killed_owner_left_is_ended_by_the_next_pool(real: Path) -> None:
    abandoned = real.parent / "mettle-999999999-0"
    (abandoned / "m").mkdir(parents=True)
    with sleepers_in(abandoned / "m") as left:
        await wait_until(lambda: bool((abandoned / "m" / "cgroup.procs").read_text()))
        home = find_home()
        assert isinstance(home, CgroupHome)
        assert left.wait(60) == -signal.SIGKILL
    assert home.close()

    def is_swept() -> bool:
        """By one of the next pools: the kernel refuses to remove a cgroup for a moment after its last process died."""
        again = find_home()
        assert isinstance(again, CgroupHome)
        assert again.close()
        return not abandoned.exists()

    await wait_until(is_swept)


@pytest.mark.usefixtures("_needs_isolation", "real")
async def test_each_machine_is_in_a_real_cgroup_of_its_own_and_none_is_left() -> None:
    async with MachinePool(SandboxConfig(require=("ns", "cgroup-kill"))) as machines:
        made = [await machines.create() for _ in range(3)]
        cgroups = [machine.cgroup for machine in made]
        assert all(cgroup is not None and cgroup.is_occupied() for cgroup in cgroups)
        await made[0].exec("sleep 300 & sleep 300 &")
        await made[0].delete()
        await wait_until(lambda: cgroups[0] is not None and not cgroups[0].is_occupied())
        assert machines._cgroups is not None
        home = machines._cgroups._path
    assert not home.exists()


@pytest.mark.usefixtures("_needs_isolation")
async def test_a_share_of_processors_that_the_host_cannot_hold_is_refused() -> None:
    async with MachinePool(SandboxConfig()) as machines:
        if machines.isolation.layer("cgroup-cpu").is_in_force:
            assert (await (await machines.create(MachineConfig(cpus=0.5))).exec("echo 1")).stdout == "1\n"
            return
        with pytest.raises(UserError, match=r"cpus is 0\.5"):
            await machines.create(MachineConfig(cpus=0.5))


@pytest.mark.usefixtures("_needs_isolation")
async def test_where_there_is_a_cgroup_a_machine_cannot_pass_its_memory() -> None:
    """Memory that no watch sees: a shared mapping, filled by children that have ended."""
    async with MachinePool(SandboxConfig()) as machines:
        if not machines.isolation.layer("cgroup-memory").is_in_force:
            pytest.skip("no memory cgroup is delegated to this user")
        machine = await machines.create(MachineConfig(memory_mb=64, disk_mb=16))
        code = (
            "import mmap, os\nm = mmap.mmap(-1, 300 << 20)\n"
            "for i in range(15):\n"
            "    if os.fork() == 0:\n"
            "        for p in range(i * 20 << 20, (i + 1) * 20 << 20, 4096): m[p] = 1\n"
            "        os._exit(0)\n"
            "    if os.wait()[1]: raise SystemExit(9)\n"
        )
        assert (await machine.exec(["python3", "-c", code])).exit_code in (9, 137)
        assert (await machine.exec("echo alive")).stdout == "alive\n"
