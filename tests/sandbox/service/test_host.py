"""How much memory a host has, is free, and is given out."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import ApiCaller, make_token

from mettle.sandbox.service import host
from mettle.sandbox.service.config import QuotaConfig


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


def test_a_quota_that_says_nothing_of_memory_is_the_hosts() -> None:
    assert QuotaConfig(max_machines=7).filled(2048) == QuotaConfig(max_machines=7, max_memory_mb=2048, max_disk_mb=2048)
    assert QuotaConfig(max_memory_mb=9).filled(2048).max_memory_mb == 9


@pytest.mark.asyncio(loop_scope="module")
async def test_no_token_is_given_more_than_the_host_has(api: ApiCaller, monkeypatch: pytest.MonkeyPatch) -> None:
    total = host.total_memory_mb()
    assert total is not None
    assert api.service.config.quota.max_memory_mb == total
    status, told = await api.ask("POST", "/machines", json={"memory_mb": total + 1})
    assert (status, told["error"]["type"]) == (429, "quota")
    monkeypatch.setattr("mettle.sandbox.service.machines.free_memory_mb", lambda: 1000)
    status, told = await api.ask("POST", "/machines", json={"memory_mb": 600, "disk_mb": 200})
    assert (status, told["error"]["type"]) == (429, "busy")
    assert "1,000 MB of memory free" in told["error"]["message"]
    status, made = await api.ask("POST", "/machines", json={"memory_mb": 600, "disk_mb": 100})
    assert status == 201
    await api.ask("DELETE", f"/machines/{made['id']}")
    own = make_token(api.home, "own", max_memory_mb=100)
    assert (await api.ask("POST", "/machines", token=own, json={"memory_mb": 101}))[1]["error"]["type"] == "quota"
