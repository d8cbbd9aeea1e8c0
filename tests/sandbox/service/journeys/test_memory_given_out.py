"""How much of a host's memory is given out."""

from __future__ import annotations

import pytest

from mettle.processes import host
from mettle.sandbox.service.config import QuotaConfig
from serving import ApiCaller, make_token


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
