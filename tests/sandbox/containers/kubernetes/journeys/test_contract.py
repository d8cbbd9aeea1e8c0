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
from mettle.sandbox.testing.fixtures import MachineFixture

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


@pytest.mark.nightly
class TestKubernetesMachines(MachineContract):
    """What a command does is the agent's matter, and the same one runs in the containers of docker every day."""


class TestKubernetesMachinesInShort(MachineFixture):
    """What hangs on the way to a pod: streams, files, ports, lives, and callers that go."""

    test_a_command_has_an_exit_code_and_two_streams = MachineContract.test_a_command_has_an_exit_code_and_two_streams
    test_standard_input_is_fed_and_ends = MachineContract.test_standard_input_is_fed_and_ends
    test_a_cancelled_caller_takes_the_command_along = MachineContract.test_a_cancelled_caller_takes_the_command_along
    test_a_stream_waits_for_its_reader_and_loses_nothing = (
        MachineContract.test_a_stream_waits_for_its_reader_and_loses_nothing
    )
    test_files_go_in_and_out_byte_by_byte = MachineContract.test_files_go_in_and_out_byte_by_byte
    test_a_snapshot_starts_another_machine = MachineContract.test_a_snapshot_starts_another_machine
    test_a_server_inside_is_reached_through_connect = MachineContract.test_a_server_inside_is_reached_through_connect
    test_a_program_inside_reaches_a_listener_of_the_host = (
        MachineContract.test_a_program_inside_reaches_a_listener_of_the_host
    )
    test_an_ended_machine_says_so = MachineContract.test_an_ended_machine_says_so
    test_a_lifetime_ends = MachineContract.test_a_lifetime_ends
    test_machines_are_known_by_id_and_label = MachineContract.test_machines_are_known_by_id_and_label


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
