"""Machines and judges in containers keep the contract, against a fake daemon whose containers run the real agent."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fakes.docker_daemon import FakeDocker

from mettle.sandbox import SandboxConfig, open_judge, open_machines
from mettle.sandbox.containers.docker.config import DockerConfig
from mettle.sandbox.protocols import Judge, Machines
from mettle.sandbox.testing import JudgeContract, MachineContract

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("_needs_isolation")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines() -> AsyncIterator[Machines]:
    async with FakeDocker() as daemon:
        docker = DockerConfig(host=daemon.url, warm=1)
        async with open_machines(SandboxConfig(backend="docker", docker=docker)) as started:
            yield started
        assert not daemon.containers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge() -> AsyncIterator[Judge]:
    async with FakeDocker() as daemon:
        docker = DockerConfig(host=daemon.url, warm=0)
        config = SandboxConfig(backend="docker", docker=docker, warm=2, timeout_s=2.0, memory_mb=256)
        async with open_judge(config) as started:
            yield started
        assert not daemon.containers


class TestDockerMachines(MachineContract):
    pass


class TestDockerJudge(JudgeContract):
    pass
