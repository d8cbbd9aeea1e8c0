"""The soak's verdict can fail: what a load leaks on purpose is named, and what it does not leak is not."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sandbox_orphans
import sandbox_soak
import soak_load
import soak_machines
import soak_programs
from line_charts import Line, Panel, charts_svg
from owners import ENVIRONMENT
from soak_load import Side, Traffic
from soak_resources import ResourceCount
from soak_verdict import Growth, judge_samples, slope, table

from mettle.sandbox import MachinePool, SandboxConfig, SandboxPool
from mettle.sandbox.service.uploads import Spool, sweep_spools

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
COUNTS = {"descriptors of the owner", "mounts of the owner", "cgroups", "files of the pools"}
STEADY = {
    *("processes", "threads of the owner", "mounts in templates", "mounts in machines", "files in templates"),
    *("descriptors of the templates", "descriptors of cells and machines", "mnt namespaces", "net namespaces"),
}


class Leak:
    """Leaves a descriptor, memory, a file, and stand-ins for a mount and a cgroup behind after each window."""

    def __init__(self, tmp: Path) -> None:
        self.folder, self.mountinfo, self.cgroups = tmp / "folder", tmp / "mountinfo", tmp / "cgroups"
        self.folder.mkdir()
        self.cgroups.mkdir()
        self.mountinfo.write_text("")
        self.descriptors: list[int] = []
        self.held: list[bytearray] = []

    def __call__(self) -> None:
        number = len(self.held)
        self.descriptors += [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        self.held.append(bytearray(b"x" * (32 << 20)))
        (self.folder / f"left-{number}").touch()
        (self.cgroups / f"mettle-{os.getpid()}-{number}").mkdir()
        self.mountinfo.write_text("left behind\n" * (number + 1))

    @property
    def resource_count(self) -> ResourceCount:
        return ResourceCount(self.folder, mountinfo=self.mountinfo, cgroup_root=self.cgroups)


@pytest.fixture
def leak(tmp_path: Path) -> Iterator[Leak]:
    made = Leak(tmp_path)
    yield made
    for descriptor in made.descriptors:
        os.close(descriptor)


async def soak(
    resource_count: ResourceCount, monkeypatch: pytest.MonkeyPatch, after: Callable[[], None]
) -> dict[str, Growth]:
    """A few short windows of a light load; the verdicts by name."""
    monkeypatch.setattr(soak_load, "available", lambda: {"honest": soak_programs.PROGRAMS["honest"]})
    monkeypatch.setattr(soak_machines, "SCENARIOS", {"a short life": soak_machines.short_life})
    config, traffic = SandboxConfig(warm=1), Traffic()
    async with SandboxPool(config) as judge, MachinePool(config) as machines:
        side = Side("test", judge, machines, traffic, random.Random(1), num_judging=1, num_working=1)
        made = sandbox_soak.Soak(
            [side], resource_count, traffic, window_s=0.1, sample_s=0.05, each_window=after, quiet_s=0.15
        )
        verdicts = await made.run(0.0)
    assert not traffic.surprises
    assert traffic.counts["test: judge: honest"] > 2
    return {one.name: one for one in verdicts}


@pytest.mark.usefixtures("_needs_isolation")
async def test_what_a_load_leaks_is_named_and_nothing_else(leak: Leak, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = await soak(leak.resource_count, monkeypatch, leak)
    growing = {name for name, one in verdicts.items() if one.is_growing}
    # Not that of all: it divides shared pages, and the pages of a test process are shared with what others have left.
    assert growing >= COUNTS | {"memory of the owner, MB"}
    assert not growing & STEADY
    assert any(line.startswith("cgroups") and line.endswith("GROWS") for line in table(list(verdicts.values())))


def test_the_slope_is_not_moved_by_single_wild_samples() -> None:
    steady = [(float(at), 10.0) for at in range(20)]
    wild = [(at, 500.0 if at in (3.0, 18.0, 19.0) else value) for at, value in steady]
    assert slope(wild) == 0.0
    assert slope([(at, value + at) for at, value in wild]) == pytest.approx(1.0, abs=0.2)


def test_growth_in_the_warm_up_is_not_held_against_it_and_later_growth_is() -> None:
    def verdict(values: list[float]) -> bool:
        samples = [(float(at), {"cgroups": value}) for at, value in enumerate(values)]
        return judge_samples(samples)[0].is_growing

    assert not verdict([*range(6), *([6.0] * 12)])
    assert verdict([*([6.0] * 6), *(6.0 + 0.1 * at for at in range(12))])
    assert verdict([*([6.0] * 12), *([7.0] * 12)]), "one cgroup was left behind, once"
    with pytest.raises(ValueError, match="too few"):
        verdict([1.0, 2.0, 3.0])


@pytest.mark.usefixtures("_needs_isolation")
def test_a_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    script, found = BENCHMARKS / "sandbox_orphans.py", tmp_path / "found.json"
    command = [sys.executable, str(script), "--rounds", "1", "--seed", "2", "--json", str(found)]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [killed] = json.loads(found.read_text())["rounds"]
    assert killed["num_processes"] > 0
    assert killed["left"] == {}


def test_what_a_killed_owner_has_left_is_counted(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.touch()
    (folder := tmp_path / "folder").mkdir()
    arena = sandbox_orphans.Arena(folder, random.Random(1), mountinfo)
    (folder / "left").touch()
    mountinfo.write_text("left behind\n")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket"))
        sleeper = subprocess.Popen(["sleep", "60"])
        try:
            left = arena.left([sleeper.pid], "")
        finally:
            sleeper.kill()
            sleeper.wait()
    assert (left["mounts"], left["folders and files"], left["sockets"]) == (1, 2, 1)
    assert left["processes"] >= 1


def test_a_chart_has_a_line_for_each_quantity_and_the_same_bytes_each_time() -> None:
    panels = [Panel("A <title>", "minutes", [Line("one", [(0, 1), (1, 30)]), Line("two", [(0, 2.0)])])]
    drawn = charts_svg(panels)
    assert drawn == charts_svg(panels)
    assert drawn.count("<polyline") == 2
    assert "A &lt;title&gt;" in drawn
    assert ">30</text>" in drawn


def test_uploads_of_a_killed_service_are_removed_and_those_under_way_are_not(tmp_path: Path) -> None:
    left = tmp_path / "mettle-upload-left"
    left.mkdir()
    (left / "0").write_bytes(b"half a file")
    (tmp_path / "somebody-elses").touch()
    with Spool(tmp_path) as spool:
        [under_way] = [path for path in tmp_path.glob("mettle-upload-*") if path != left]
        sweep_spools(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([under_way.name, "somebody-elses"])
        assert spool.files == {}
    assert [path.name for path in tmp_path.iterdir()] == ["somebody-elses"]
