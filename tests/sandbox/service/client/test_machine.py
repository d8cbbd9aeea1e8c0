"""The contract, kept by sandboxes behind a service; and what comes of there being a network in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from mettle.sandbox import SandboxConfig, open_judge, open_machines
from mettle.sandbox.protocols import Judge, Machines
from mettle.sandbox.service.state import SandboxService
from mettle.sandbox.testing import JudgeContract, MachineContract
from serving import make_token, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("_needs_isolation")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("service")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSB_TOKEN", make_token(path))
        yield path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(home: Path) -> AsyncIterator[tuple[SandboxService, str]]:
    async with serving(home) as started:
        yield started


def remote(*urls: str) -> SandboxConfig:
    return SandboxConfig(backend="remote", urls=urls, token_env="MSB_TOKEN")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines(served: tuple[SandboxService, str]) -> AsyncIterator[Machines]:
    async with open_machines(remote(served[1])) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge(served: tuple[SandboxService, str]) -> AsyncIterator[Judge]:
    async with open_judge(remote(served[1])) as started:
        yield started


class TestRemoteMachines(MachineContract):
    pass


class TestRemoteJudge(JudgeContract):
    pass
