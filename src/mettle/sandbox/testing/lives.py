"""How machines end, and what is said about those that have."""

from __future__ import annotations

import asyncio

import pytest

from mettle.errors import SandboxError, UserError
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.endings import MachineLost
from mettle.sandbox.protocols import Machine, Machines
from mettle.sandbox.testing.fixtures import MachineFixture


class LifeContract(MachineFixture):
    """Limits, ends, and mistakes."""

    async def test_memory_over_the_limit_ends_the_largest_process(self, machines: Machines) -> None:
        made = await machines.create(MachineConfig(memory_mb=64))
        small = await made.start("sleep 0.5; echo small")
        code = "import sys\nkept = []\nwhile True: kept.append(bytearray(1 << 20))"
        result = await made.exec(["python3", "-c", code], timeout_s=20)
        assert result.is_out_of_memory
        assert result.exit_code == 137
        ended = await small.wait(5)
        assert ended is not None
        assert ended.stdout == "small\n"
        await made.delete()

    async def test_an_ended_machine_says_so(self, machines: Machines) -> None:
        made = await machines.create()
        running = asyncio.create_task(made.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.1)
        await made.delete()
        await made.delete()
        assert not made.is_alive
        for attempt in (running, made.exec("true"), made.download("x"), made.listen(), made.snapshot()):
            with pytest.raises(SandboxError, match="it was deleted"):
                await attempt
        with pytest.raises(SandboxError, match="there is no machine"):
            machines.get(made.id)

    async def test_a_lifetime_ends(self, machines: Machines) -> None:
        made = await machines.create(MachineConfig(lifetime_s=0.4))
        with pytest.raises(MachineLost, match=r"its lifetime of 0.4 s is over"):
            await made.exec("sleep 60", timeout_s=60)

    async def test_an_idle_machine_ends_and_a_busy_one_does_not(self, machines: Machines) -> None:
        made = await machines.create(MachineConfig(idle_s=0.4))
        assert (await made.exec("sleep 0.9; echo worked")).stdout == "worked\n"
        assert made.is_alive
        await asyncio.sleep(0.7)
        with pytest.raises(MachineLost, match=r"nothing was asked of it for 0.4 s"):
            await made.exec("true")

    async def test_what_the_caller_gets_wrong_is_said(self, machines: Machines, machine: Machine) -> None:
        with pytest.raises(UserError, match="memory_mb is 1"):
            MachineConfig(memory_mb=1)
        with pytest.raises(UserError, match="lifetime_s is -1"):
            MachineConfig(lifetime_s=-1)
        with pytest.raises(UserError, match="must be strings"):
            await machine.exec("true", env={"A": 1})  # type: ignore[dict-item]
        with pytest.raises(UserError, match="cannot be set"):
            await machines.create(MachineConfig(env={"A=B": "1"}))

    async def test_machines_are_known_by_id_and_label(self, machines: Machines, machine: Machine) -> None:
        assert machines.get(machine.id) is machine
        assert [known.id for known in machines.machines if known.config.labels.get("for") == "a test"] == [machine.id]
