"""Containers that mask parts of /proc: everything works and is contained, only that there is no /proc inside."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from arena import MACHINE_LIMITS, attack_as_test, broken, open_plant, traces_of_test
from attacks import ATTACKS
from planted import Planted
from simulated import on_host, start_on

from mettle.errors import UserError
from mettle.sandbox import Machine, MachinePool, SandboxConfig, SandboxPool, StdioTest, Verdict
from mettle.sandbox.testing import MachineContract

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mask /proc"),
    pytest.mark.usefixtures("_needs_isolation"),
]
CHOSEN = [attack for attack in ATTACKS if "/proc" in attack.code or "fork" in attack.code]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines(_needs_isolation: None) -> AsyncIterator[MachinePool]:
    pool = MachinePool(SandboxConfig())
    await start_on(pool, "masked")
    yield pool
    await pool.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(_needs_isolation: None) -> AsyncIterator[SandboxPool]:
    judge = SandboxPool(SandboxConfig(warm=2, timeout_s=2.0, memory_mb=256))
    await start_on(judge, "masked")
    yield judge
    await judge.close()


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Planted]:
    with open_plant(tmp_path) as things:
        yield things


class TestMachinesWithoutProc(MachineContract):
    async def test_the_report_says_that_there_is_no_proc(self, machine: Machine) -> None:
        assert machine.isolation.grade == "ns"
        layer = machine.isolation.layer("own-proc")
        assert not layer.is_in_force
        assert "procMount: Unmasked" in layer.fix
        assert (await machine.exec("ls -A /proc")).stdout == ""

    async def test_memory_of_many_processes_is_held_together(self, machines: MachinePool) -> None:
        made = await machines.create(MACHINE_LIMITS)
        code = "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(60 << 20)\ntime.sleep(60)"
        assert (await made.exec(["python3", "-c", code], timeout_s=20)).is_out_of_memory
        await made.delete()


async def test_a_layer_that_is_missing_can_be_required() -> None:
    with on_host("masked"), pytest.raises(UserError, match="own /proc"):
        await MachinePool(SandboxConfig(require=("ns", "own-proc"))).__aenter__()


async def test_other_languages_and_processes_are_judged(pool: SandboxPool) -> None:
    code = "import subprocess\nprint(subprocess.run(['/bin/echo', 'hi'], capture_output=True, text=True).stdout)"
    assert (await pool.judge(code, [StdioTest("", "hi")])).has_passed
    assert (await pool.judge("cat; echo $((6*7)) | cat", [StdioTest("x\n", "x 42")], language="bash")).has_passed
    forks = "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(40 << 20)\ntime.sleep(60)"
    assert (await pool.judge(forks, [StdioTest()], memory_mb=160)).tests[0].verdict is Verdict.MEMORY
    busy = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    assert (await pool.judge(busy, [StdioTest()], timeout_s=0.2)).tests[0].verdict is Verdict.TIMEOUT


@pytest.mark.parametrize("attack", CHOSEN, ids=lambda attack: attack.name)
async def test_contained_as_a_test(pool: SandboxPool, planted: Planted, attack: object) -> None:
    result = await attack_as_test(pool, attack, planted)  # type: ignore[arg-type]
    assert traces_of_test(result, planted) == []
    assert broken(result.stderr) == []
