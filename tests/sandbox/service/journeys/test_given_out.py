"""How much of a host's memory and processors is given out."""

from __future__ import annotations

import pytest

from mettle.processes import host
from mettle.sandbox import MachinePool
from mettle.sandbox.service.config import QuotaConfig
from serving import ApiCaller, make_token


def test_a_quota_that_says_nothing_of_memory_and_processors_is_the_hosts() -> None:
    whole = QuotaConfig(max_machines=7, max_memory_mb=2048, max_disk_mb=2048, max_cpus=8)
    assert QuotaConfig(max_machines=7).filled(2048, 8) == whole
    own = QuotaConfig(max_memory_mb=9, max_cpus=0.5).filled(2048, 8)
    assert (own.max_memory_mb, own.max_disk_mb, own.max_cpus) == (9, 2048, 0.5)


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


@pytest.fixture
def _holds_shares(api: ApiCaller, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host whose cgroups hold machines to their `cpus`."""
    monkeypatch.setattr(MachinePool, "_check_cpus", lambda pool, config: None)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.usefixtures("_holds_shares")
async def test_no_more_processors_are_given_out_than_the_host_has(
    api: ApiCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = host.usable_cores() * api.service.config.cpus_per_core
    assert api.service.config.quota.max_cpus == most
    status, told = await api.ask("POST", "/machines", json={"cpus": most + 1})
    assert (status, told["error"]["type"]) == (429, "quota")
    assert f"max_cpus {most:g} and asks for {most + 1:g} more" in told["error"]["message"]

    monkeypatch.setattr(api.service.register, "_max_cpus", 2.0)
    other = make_token(api.home, "second")
    status, first = await api.ask("POST", "/machines", token=other, json={"cpus": 1.5})
    assert status == 201
    status, told = await api.ask("POST", "/machines", json={"cpus": 1.0})
    assert (status, told["error"]["type"]) == (429, "busy")
    assert "2 processors to give out" in told["error"]["message"]
    assert "1.5 are, and the machine asks for 1:" in told["error"]["message"]
    status, small = await api.ask("POST", "/machines", json={"cpus": 0.25})
    assert status == 201
    assert api.service.quotas.cpus == pytest.approx(1.75)
    monkeypatch.setattr(api.service.quotas, "uncapped_cpus", 0.5)
    assert (await api.ask("POST", "/machines", json={}))[1]["error"]["type"] == "busy"

    await api.ask("DELETE", f"/machines/{first['id']}", token=other)
    status, third = await api.ask("POST", "/machines", json={"cpus": 1.5})
    assert status == 201, "what has ended is given out again"
    for made in (small, third):
        await api.ask("DELETE", f"/machines/{made['id']}")
    assert api.service.quotas.cpus == 0.0
