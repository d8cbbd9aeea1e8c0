"""The contract of machines, over both embedded backends, and what is special to each of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mettle.sandbox import Machine, MachinePool, SandboxConfig
from mettle.sandbox.packages import package_paths
from mettle.sandbox.testing import MachineContract

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.usefixtures("_needs_isolation")
class TestIsolatedMachines(MachineContract):
    async def test_the_report_is_stored_with_the_machine(self, machine: Machine) -> None:
        assert machine.isolation.grade == "ns"

    async def test_any_directory_can_be_made_and_ends_with_the_machine(self, machine: Machine) -> None:
        await machine.upload("/app/main.sh", "echo $PWD")
        assert (await machine.exec("sh main.sh", cwd="/app")).stdout == "/app\n"
        result = await machine.exec("mkdir /home/me && touch /etc/x /usr/x /opt/x")
        assert "/opt/x" not in result.stderr

    async def test_a_terminal_can_be_opened(self, machine: Machine) -> None:
        result = await machine.exec(["script", "-qec", "tty; echo $((6*7))", "/dev/null"])
        assert result.stdout == "/dev/pts/0\r\n42\r\n", result

    async def test_a_compiler_and_processes_work(self, machine: Machine) -> None:
        code = "from multiprocessing import Pool\nif __name__ == '__main__':\n    print(sum(Pool(3).map(abs, range(-9, 0))))"
        await machine.upload("pool.py", code)
        assert (await machine.exec("python3 pool.py")).stdout == "45\n"
        await machine.upload("main.c", '#include <stdio.h>\nint main() { puts("compiled"); }')
        if (await machine.exec("command -v gcc")).exit_code == 0:
            assert (await machine.exec("gcc main.c && ./a.out")).stdout == "compiled\n"

    async def test_idle_machines_are_cheap(self, machines: MachinePool) -> None:
        before_s = time.process_time() + _cpu_s(machines.template_pid)
        made = [await machines.create() for _ in range(50)]
        cpu_s = time.process_time() + _cpu_s(machines.template_pid) - before_s
        # Process 1 does not let its own user look into it.
        resident = [_proportional_bytes(pid) for pid in _children(machines.template_pid) if os.geteuid() == 0] or [0]
        for one in made:
            await one.delete()
        assert cpu_s / 50 < 0.1
        assert sum(resident) / len(resident) < 6 << 20


class TestUnsafeMachines(MachineContract):
    @pytest.fixture
    def machines(self, unsafe_machines: MachinePool) -> MachinePool:
        return unsafe_machines

    async def test_the_report_says_that_nothing_isolates(self, machine: Machine) -> None:
        assert machine.isolation.backend == "unsafe"
        assert machine.isolation.grade == "none"


@pytest.mark.usefixtures("_needs_isolation")
async def test_chosen_packages_are_shown_and_nothing_beside_them() -> None:
    async with MachinePool(SandboxConfig(python_packages=("pytest", "no-such-package"))) as pool:
        machine = await pool.create()
        shown = await machine.exec(["python3", "-c", "import pytest, pluggy; print(pytest.__file__)"])
        assert shown.stdout == "/packages/pytest/__init__.py\n", shown.stderr
        names = (await machine.exec("ls /packages")).stdout.split()
        assert "pluggy" in names
        assert "pydantic" not in names
        assert (await machine.exec("touch /packages/pytest/x /packages/x")).exit_code != 0
    assert package_paths(("pytest", "no-such-package")).missing == ("no-such-package",)


def _children(pid: int | None) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_s(pid: int | None) -> float:
    """Processor time of a process and of those that it has waited for."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _proportional_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
