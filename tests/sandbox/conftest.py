"""One pool per test module: starting one costs a tenth of a second, and every judgement has its own cell anyway."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from mettle.sandbox import IsolationReport, MachinePool, SandboxConfig, SandboxPool, probe

pytest.register_assert_rewrite("mettle.sandbox.testing")
sys.path.append(str(Path(__file__).parent))  # for the data modules beside the tests
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # for test_soak.py

from serving import ApiCaller, make_token, serving  # noqa: E402


@pytest.fixture(scope="session")
def host_isolation() -> IsolationReport:
    return probe(SandboxConfig())


@pytest.fixture(scope="session")
def _needs_isolation(host_isolation: IsolationReport) -> None:
    if not host_isolation.is_at_least("ns"):
        pytest.skip("this host cannot isolate code: " + " / ".join(host_isolation.lines()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(_needs_isolation: None) -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig(warm=2, timeout_s=2.0, memory_mb=256)) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unsafe_pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig(backend="unsafe", warm=2, timeout_s=2.0, memory_mb=256)) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines(_needs_isolation: None) -> AsyncIterator[MachinePool]:
    async with MachinePool(SandboxConfig()) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unsafe_machines() -> AsyncIterator[MachinePool]:
    async with MachinePool(SandboxConfig(backend="unsafe")) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiCaller]:
    home = tmp_path_factory.mktemp("service")
    make_token(home, "other")
    quick = {"max_body_mb": 8, "max_json_mb": 4, "max_output_mb": 2, "stall_s": 1.0}
    async with serving(home, **quick) as (service, url), aiohttp.ClientSession() as session:
        yield ApiCaller(session, url, service, home)
