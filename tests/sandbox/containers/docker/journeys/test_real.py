"""The contract, kept by a real daemon that speaks the Docker Engine API: only where METTLE_TEST_DOCKER names one.

    METTLE_TEST_DOCKER=unix:///var/run/docker.sock METTLE_TEST_IMAGE=python:3.12-slim pytest tests/sandbox/containers/docker/journeys/test_real.py

`METTLE_TEST_REQUIRE` is the isolation to require, `ns` without it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from mettle.sandbox import MachineConfig, SandboxConfig, open_judge, open_machines
from mettle.sandbox.containers.docker.config import DockerConfig
from mettle.sandbox.containers.errors import MachineOutOfMemory
from mettle.sandbox.protocols import Judge, Machines
from mettle.sandbox.testing import JudgeContract, MachineContract

HOST = os.environ.get("METTLE_TEST_DOCKER", "")

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not HOST, reason="METTLE_TEST_DOCKER names no daemon"),
]


def config_for(warm: int, **changes: Any) -> SandboxConfig:
    image = os.environ.get("METTLE_TEST_IMAGE", "python:3.12-slim")
    docker = DockerConfig(host=HOST, image=image, pull="missing", warm=warm)
    return SandboxConfig(
        backend="docker", docker=docker, require=os.environ.get("METTLE_TEST_REQUIRE", "ns"), **changes
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines() -> AsyncIterator[Machines]:
    async with open_machines(config_for(1)) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge() -> AsyncIterator[Judge]:
    async with open_judge(config_for(0, timeout_s=5.0, memory_mb=256)) as started:
        yield started


class TestRealDockerMachines(MachineContract):
    pass


class TestRealDockerJudge(JudgeContract):
    pass


async def test_memory_over_the_limit_ends_the_container_or_the_program(machines: Machines) -> None:
    machine = await machines.create(MachineConfig(memory_mb=64, disk_mb=16))
    try:
        ran = await machine.exec(["python3", "-c", "x = bytearray(1 << 30)"])
        assert ran.exit_code != 0
    except MachineOutOfMemory:
        pass
    finally:
        await machine.delete()
