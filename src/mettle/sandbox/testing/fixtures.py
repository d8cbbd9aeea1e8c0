"""The machine that each test of the contract gets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.protocols import Machine, Machines


@pytest.mark.asyncio(loop_scope="module")
class MachineFixture:
    """A new machine for each test, from the fixture `machines` that the subclass gives."""

    @pytest_asyncio.fixture(loop_scope="module")
    async def machine(self, machines: Machines) -> AsyncIterator[Machine]:
        made = await machines.create(MachineConfig(env={"GREETING": "hello"}, labels={"for": "a test"}))
        yield made
        await made.delete()
