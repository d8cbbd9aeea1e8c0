"""How much memory a host has, and how much of it is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from mettle.processes import host


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of 8 GB of which 6 are free, in a container of 2 GB."""
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n")
    (tmp_path / "own").write_text("0::/pod/service\n")
    groups = tmp_path / "cgroup"
    (groups / "pod" / "service").mkdir(parents=True)
    for folder, limit in ((groups / "pod", 2 << 30), (groups / "pod" / "service", "max")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{1 << 30}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {512 << 20}\n")
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(host, "_GROUPS", groups)
    return tmp_path


def test_a_container_has_what_its_groups_leave_it(files: Path) -> None:
    assert (host.total_memory_mb(), host.free_memory_mb()) == (2048, 1536)
    (files / "cgroup" / "pod" / "memory.max").write_text("max\n")
    assert (host.total_memory_mb(), host.free_memory_mb()) == (8192, 6144)
    (files / "own").unlink()
    (files / "meminfo").unlink()
    assert (host.total_memory_mb(), host.free_memory_mb()) == (None, None)


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 6), ("250000 100000", 2), ("50000 100000", 1), ("", 6)])
def test_cores_are_those_of_the_affinity_and_the_quota(
    files: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    (files / "cgroup" / "cpu.max").write_text(quota)
    assert host.usable_cores() == cores


def test_waits_for_cores_are_told_by_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_OWN_THREADS", tmp_path)
    assert host.waits_for_cores_s() is None
    for thread, waited in (("7", 1_500_000_000), ("8", 0)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"900000000 {waited} 12\n")
    (tmp_path / "9").mkdir()  # has ended
    assert host.waits_for_cores_s() == {"7": 1.5, "8": 0.0}
