"""Machines in containers, wherever they are: what `docker` and `kubernetes` have in common.

    host      makes a container with an agent in it, by its own API (`ContainerHost`)
    pool      gives it its limits, files and end, and keeps the register (`ContainerPool`)
    machine   a service's machine, whose service is the agent inside

Invariant: a container that was made is removed, by its machine, by the pool, or, when both were killed, by its agent
(which ends with the stream to it) and the next pool's sweep.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from mettle.errors import SandboxError, UserError
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.containers import grading
from mettle.sandbox.containers.grading import Surroundings
from mettle.sandbox.containers.machine import Container, ContainerMachine
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.files import Snapshot, deleted_on_failure, fill
from mettle.sandbox.machines.registry import MachineRegistry
from mettle.sandbox.pools import MeasuredPool

logger = logging.getLogger(__name__)

_ROOM: Final = Path(__file__).parent
_EXPLORER: Final = _ROOM.with_name("explorer.py")
_PROBE: Final = _ROOM / "probe.py"
_PROBE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a container is made with, so that one made ahead of time can be used for what has the same."""

    image: str
    memory_mb: int
    disk_mb: int
    max_processes: int
    cpus: float


class ContainerHost(Protocol):
    """A Docker daemon or a cluster, as the pool uses it."""

    @property
    def interpreter(self) -> str:
        """The Python of its images."""
        ...

    async def open(self) -> None:
        """Reach it, see what it can do, and remove what dead owners have left. Raises: UserError, SandboxError."""
        ...

    def shape_of(self, config: MachineConfig) -> Shape: ...

    async def make(self, shape: Shape, config: MachineConfig) -> Container:
        """A container, made ahead of time or now. Raises: UserError, SandboxError."""
        ...

    def surroundings(self) -> Surroundings:
        """What is to be tried from inside, and said in the report."""
        ...

    async def close(self) -> None:
        """Remove what was made ahead of time, and let go of the service. Safe to call twice."""
        ...


class ContainerPool(MeasuredPool):
    """Makes machines that are containers. Use as `async with`."""

    def __init__(self, config: SandboxConfig, host: ContainerHost) -> None:
        super().__init__(config)
        self.host = host
        self._registry: MachineRegistry[ContainerMachine] = MachineRegistry()

    @property
    def machines(self) -> tuple[ContainerMachine, ...]:
        """Those that have not been deleted."""
        return self._registry.all()

    def get(self, machine_id: str) -> ContainerMachine:
        """A machine by its id; SandboxError when there is none."""
        return self._registry.get(machine_id)

    async def measure(self) -> IsolationReport:
        """Find out what is in force, by programs in a machine that try the doors."""
        await self.host.open()
        machine = await self.make(MachineConfig(), grading.unmeasured(self.config))
        try:
            await machine.begin()
            doors = await self._run(machine, _EXPLORER, "machine")
            place = await self._run(machine, _PROBE, json.dumps(self.host.surroundings().targets))
        finally:
            await machine.delete()
        return grading.examine(self.config, doors, place, self.host.surroundings())

    async def create(
        self, config: MachineConfig | None = None, *, snapshot: Snapshot | None = None
    ) -> ContainerMachine:
        """A new machine, with its first files in place. Raises: SandboxError if it cannot be made."""
        config, report = config or MachineConfig(), self.isolation
        config.limits()  # says what is wrong with it before anything is made
        if config.network is not None and self.host.surroundings().has_network:
            raise UserError(
                "a machine's network is an allow-list, and these containers have a network of their own beside it; "
                f"set sandbox.{self.config.backend}.network to 'none'"
            )
        machine = await self.make(config, report)
        async with deleted_on_failure(machine):
            await machine.begin()
            await machine.open_egress()
        await fill(machine, config.files, snapshot)
        machine.on_end = self._registry.forget
        self._registry.add(machine)
        return machine

    async def make(self, config: MachineConfig, report: IsolationReport) -> ContainerMachine:
        """A machine that nobody has given limits yet, and that is not in the register."""
        container = await self.host.make(self.host.shape_of(config), config)
        return ContainerMachine(config, report, container)

    async def close(self) -> None:
        """Delete every machine, and let go of the host. Safe to call twice."""
        await self._registry.close()
        await self.host.close()
        self._isolation = None

    async def _run(self, machine: ContainerMachine, program: Path, argument: str) -> dict[str, Any]:
        command = [self.host.interpreter, "-I", "-S", "-", argument]
        result = await machine.exec(command, stdin=await asyncio.to_thread(program.read_bytes), timeout_s=_PROBE_S)
        if result.exit_code != 0:
            raise SandboxError(f"the look at a machine's isolation failed: {result.stderr[-500:]}")
        found: dict[str, Any] = json.loads(result.stdout)
        return found
