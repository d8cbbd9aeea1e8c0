"""Memory cgroups: where one may be made, what is written, what is swept. On a tree of plain files, and on the kernel's own
where version 2 is delegated with memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mettle.sandbox import MachineConfig, MachinePool, SandboxConfig
from mettle.sandbox.cgroups import CgroupHome, MachineCgroup

LIMITS = MachineConfig(memory_mb=100, disk_mb=28, max_processes=20).limits()


class Tree:
    """A cgroup2 mount made of files: `/slice` may be divided or not, and this process is in `/slice/own`."""

    def __init__(self, root: Path, passed_on: str) -> None:
        self.slice = root / "cg" / "slice"
        (self.slice / "own").mkdir(parents=True)
        (self.slice / "cgroup.subtree_control").write_text(passed_on)
        (self.slice / "own" / "cgroup.subtree_control").write_text("")
        (self.slice / "cgroup.procs").write_text("")
        self.mountinfo, self.membership = root / "mountinfo", root / "membership"
        self.mountinfo.write_text(f"30 1 0:26 / {root}/cg rw,nosuid - cgroup2 cgroup2 rw\n")
        self.membership.write_text("4:memory:/elsewhere\n0::/slice/own\n")

    def find(self) -> CgroupHome | None:
        return CgroupHome.find(str(self.mountinfo), str(self.membership))


@pytest.fixture
def _kernel_makes_files(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def mkdir(path: Path, *args: object, **kwargs: object) -> None:
        real(path)
        for name in ("memory.max", "memory.swap.max", "pids.max", "cgroup.procs"):
            (path / name).write_text("")

    monkeypatch.setattr(Path, "mkdir", mkdir)


def test_a_home_is_made_beside_this_process_where_memory_is_passed_on(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "cpu memory pids")
    home = tree.find()
    assert home is not None
    [made] = tree.slice.glob("mettle-*")
    assert made.name.startswith(f"mettle-{os.getpid()}-")
    assert (made / "cgroup.subtree_control").read_text() == "+memory +pids"


@pytest.mark.parametrize("passed_on", ["", "cpu pids", "memory"])
def test_there_is_no_home_where_memory_and_processes_are_not_passed_on(tmp_path: Path, passed_on: str) -> None:
    tree = Tree(tmp_path, passed_on)
    assert tree.find() is None
    assert list(tree.slice.glob("mettle-*")) == []


def test_there_is_no_home_on_a_host_without_version_2(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "memory pids")
    tree.mountinfo.write_text("")
    assert tree.find() is None
    tree = Tree(tmp_path / "other", "memory pids")
    tree.membership.write_text("4:memory:/elsewhere\n")
    assert tree.find() is None


@pytest.mark.usefixtures("_kernel_makes_files")
def test_a_machine_gets_memory_for_its_processes_and_its_files(tmp_path: Path) -> None:
    made = MachineCgroup(tmp_path / "m", LIMITS)
    assert (tmp_path / "m" / "memory.max").read_text() == str(128 << 20)
    assert (tmp_path / "m" / "memory.swap.max").read_text() == "0"
    assert int((tmp_path / "m" / "pids.max").read_text()) >= 20
    os.write(made.procs, b"0")
    made.close_entrance()
    made.close_entrance()
    assert made.is_occupied()
    assert made.num_killed() == 0
    (tmp_path / "m" / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert made.num_killed() == 2


def test_what_a_killed_owner_left_is_swept_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "memory pids")
    dead, alive = tree.slice / "mettle-999999999-0", tree.slice / f"mettle-{os.getppid()}-0"
    for home in (dead, alive):
        (home / "m-1").mkdir(parents=True)
    assert tree.find() is not None
    assert not dead.exists()
    assert alive.exists()


@pytest.mark.usefixtures("_needs_isolation")
async def test_where_there_is_a_cgroup_a_machine_cannot_pass_its_memory() -> None:
    """Memory that no watch sees: a shared mapping, filled by children that have ended."""
    async with MachinePool(SandboxConfig()) as machines:
        if not any(layer.name == "memory cgroup" and layer.is_in_force for layer in machines.isolation.layers):
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
