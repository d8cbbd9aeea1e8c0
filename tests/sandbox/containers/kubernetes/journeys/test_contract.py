"""Machines and judges in pods keep the contract, against a fake cluster whose pods run the real agent."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fakes.kubernetes_api import FakeKubernetes

from mettle.sandbox import SandboxConfig, open_judge, open_machines
from mettle.sandbox.containers.kubernetes.config import KubernetesConfig
from mettle.sandbox.protocols import Judge, Machines
from mettle.sandbox.testing import JudgeContract, MachineContract

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("_needs_isolation")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines() -> AsyncIterator[Machines]:
    async with FakeKubernetes() as cluster:
        kubernetes = KubernetesConfig(kubeconfig=cluster.kubeconfig(), warm=1)
        async with open_machines(SandboxConfig(backend="kubernetes", kubernetes=kubernetes)) as started:
            yield started
        assert not cluster.pods


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge() -> AsyncIterator[Judge]:
    async with FakeKubernetes() as cluster:
        kubernetes = KubernetesConfig(kubeconfig=cluster.kubeconfig(), warm=0)
        config = SandboxConfig(backend="kubernetes", kubernetes=kubernetes, warm=2, timeout_s=2.0, memory_mb=256)
        async with open_judge(config) as started:
            yield started
        assert not cluster.pods


class TestKubernetesMachines(MachineContract):
    pass


class TestKubernetesJudge(JudgeContract):
    pass
