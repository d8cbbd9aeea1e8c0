"""Memory that no process's size shows: a machine and a test are held to their limit all the same."""

from __future__ import annotations

import os

import pytest
from hidden_memory import HIDDEN_MEMORY

from mettle.sandbox import MachineConfig, MachinePool, SandboxPool, StdioTest

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_MB = 64
SLACK_MB = 160  # what sockets can take between two looks of process 1, at several GB a second
# A file is limited without isolation, too; page tables and mappings are watched; pipes of an ordinary user are limited by
# the host.
HELD_ANYWAY = {
    *("a file in memory without a name", "page tables", "mappings without memory, copied by forks"),
    "pages, beside a process that forks without end",
    *([] if os.geteuid() == 0 else ["buffers of pipes"]),
}
WITHOUT_ISOLATION = [name for name in HIDDEN_MEMORY if name not in HELD_ANYWAY]


def last_number(output: str) -> int:
    return int((output.split() or ["0"])[-1])


@pytest.mark.parametrize("name", HIDDEN_MEMORY)
async def test_a_machine_holds_no_more_than_its_memory(machines: MachinePool, name: str) -> None:
    machine = await machines.create(MachineConfig(memory_mb=LIMIT_MB, disk_mb=16))
    await machine.upload("hidden.py", HIDDEN_MEMORY[name])
    result = await machine.exec(["python3", "hidden.py"], timeout_s=20)
    assert result.exit_code != 0, result
    assert last_number(result.stdout) <= LIMIT_MB + SLACK_MB
    assert "NameError" not in result.stderr
    assert (await machine.exec("echo still here")).stdout == "still here\n"
    await machine.delete()


@pytest.mark.parametrize("name", HIDDEN_MEMORY)
async def test_a_judged_test_holds_no_more_than_its_memory(pool: SandboxPool, name: str) -> None:
    result = await pool.judge(HIDDEN_MEMORY[name], [StdioTest("", "")], memory_mb=LIMIT_MB)
    [test] = result.tests
    assert last_number(test.stdout) <= LIMIT_MB + SLACK_MB, test
    assert "NameError" not in test.stderr


@pytest.mark.parametrize("name", WITHOUT_ISOLATION)
async def test_without_isolation_it_gets_more(unsafe_machines: MachinePool, name: str) -> None:
    machine = await unsafe_machines.create(MachineConfig(memory_mb=LIMIT_MB, disk_mb=16))
    await machine.upload("hidden.py", HIDDEN_MEMORY[name])
    result = await machine.exec(["python3", "hidden.py"], timeout_s=20)
    assert last_number(result.stdout) > LIMIT_MB + SLACK_MB, result
    await machine.delete()


async def test_buffers_that_are_in_use_and_small_bother_nobody(machines: MachinePool, pool: SandboxPool) -> None:
    code = (
        "import multiprocessing as m, os, socket\n"
        "held = [socket.socketpair() for _ in range(20)] + [os.pipe() for _ in range(20)]\n"
        "with m.Pool(3) as workers: print(sum(workers.map(abs, range(1000))))\n"
    )
    result = await pool.judge(code, [StdioTest("", "499500")], memory_mb=LIMIT_MB * 2)
    assert result.has_passed, result
    machine = await machines.create(MachineConfig(memory_mb=LIMIT_MB * 2))
    await machine.upload("work.py", code)
    assert (await machine.exec(["python3", "work.py"])).stdout == "499500\n"
    await machine.delete()
