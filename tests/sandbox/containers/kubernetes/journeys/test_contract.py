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


@pytest.mark.nightly
class TestKubernetesJudge(JudgeContract):
    """What a program's end means is the agent's matter, and the same one runs in the containers of docker every day."""


class TestKubernetesJudgeInShort:
    """What hangs on the pods themselves: that each judgement has its own, several at once, and one that is given up."""

    test_each_test_has_its_own_verdict = JudgeContract.test_each_test_has_its_own_verdict
    test_the_isolation_in_force_stands_in_the_result = JudgeContract.test_the_isolation_in_force_stands_in_the_result
    test_many_at_once_all_get_their_own_answer = JudgeContract.test_many_at_once_all_get_their_own_answer
    test_a_cancelled_judgement_leaves_the_pool_healthy = (
        JudgeContract.test_a_cancelled_judgement_leaves_the_pool_healthy
    )
