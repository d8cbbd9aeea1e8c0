"""Machines in containers, wherever they are: what `docker` and `kubernetes` have in common.

    host      makes a container with an agent in it, by its own API (`ContainerHost`)
    pool      gives it its limits, files and end, and keeps the register (`ContainerPool`)
    machine   `machines/machine.py` at the end of an agent's line

Invariant: a container that was made is removed, by its machine, by the pool, or, when both were killed, by its agent
(which ends with the line) and the next pool's sweep.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from mettle.errors import SandboxError, UserError
from mettle.sandbox import isolation
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.containers import grading
from mettle.sandbox.containers.grading import Surroundings
from mettle.sandbox.containers.line import AgentLine
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.files import Snapshot
from mettle.sandbox.machines.line import MachineLost
from mettle.sandbox.machines.machine import LocalMachine as Machine
from mettle.sandbox.machines.registry import MachineRegistry as Registry
from mettle.sandbox.zygote.settings import MachineLimits

logger = logging.getLogger(__name__)

_ROOM: Final = Path(__file__).parent
_EXPLORER: Final = _ROOM.with_name("explorer.py")
_PROBE: Final = _ROOM / "probe.py"
_BEGIN_S: Final = 30.0
_PROBE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a container is made with, so that one made ahead of time can be used for what has the same."""

    image: str
    memory_mb: int
    disk_mb: int
    max_processes: int
    cpus: float


class Container(Protocol):
    """A container that runs, with its agent ready at the end of `line`."""

    id: str
    line: AgentLine

    async def fate(self) -> MachineLost:
        """What became of it, when its line has ended by itself."""
        ...

    async def remove(self) -> None:
        """End and remove it. Doing it twice is harmless."""
        ...


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


class ContainerMachine(Machine):
    """A machine that is a container."""

    def __init__(self, config: MachineConfig, report: IsolationReport, container: Container) -> None:
        super().__init__(f"m-{secrets.token_hex(6)}", config, report, container.line, container.remove)
        self.container = container
        self.line = container.line
        container.line.fate = self._learn_fate

    async def delete(self, why: str = "it was deleted") -> None:
        await super().delete(why)
        await self.container.remove()

    def close(self) -> None:
        super().close()
        if self.container.line.is_open:
            self.container.line.close()

    async def _learn_fate(self) -> MachineLost:
        lost = await self.container.fate()
        if not self.why_ended:
            self.why_ended, self.lost_as = str(lost), type(lost)
        return lost


class ContainerPool:
    """Makes machines that are containers. Use as `async with`."""

    def __init__(self, config: SandboxConfig, host: ContainerHost) -> None:
        self.config = config
        self.host = host
        self._registry = Registry()
        self._isolation: IsolationReport | None = None

    @property
    def isolation(self) -> IsolationReport:
        """What was measured to be in force in a machine when the pool started."""
        if self._isolation is None:
            raise UserError("the machine pool has not been started; use `async with` around its use")
        return self._isolation

    @property
    def machines(self) -> tuple[Machine, ...]:
        """Those that have not been deleted."""
        return self._registry.all()

    def get(self, machine_id: str) -> Machine:
        """A machine by its id; SandboxError when there is none."""
        return self._registry.get(machine_id)

    async def __aenter__(self) -> Self:
        try:
            await self.host.open()
            report = await self.measure()
            isolation.check(report, self.config)
        except BaseException:
            await self.close()
            raise
        self._isolation = report
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def measure(self) -> IsolationReport:
        """Find out what is in force, by programs in a machine that try the doors."""
        machine = await self.make(MachineConfig(), grading.unmeasured(self.config))
        try:
            await self._begin(machine)
            doors = await self._run(machine, _EXPLORER, "machine")
            place = await self._run(machine, _PROBE, json.dumps(self.host.surroundings().targets))
        finally:
            await machine.delete()
        return grading.examine(self.config, doors, place, self.host.surroundings())

    async def create(self, config: MachineConfig | None = None, *, snapshot: Snapshot | None = None) -> Machine:
        """A new machine, with its first files in place. Raises: SandboxError if it cannot be made."""
        config, report = config or MachineConfig(), self.isolation
        config.limits()  # says what is wrong with it before anything is made
        if config.network is not None and self.host.surroundings().has_network:
            raise UserError(
                "a machine's network is an allow-list, and these containers have a network of their own beside it; "
                f"set sandbox.{self.config.backend}.network to 'none'"
            )
        machine = await self.make(config, report)
        try:
            await self._begin(machine)
            await machine.open_egress()
            if snapshot is not None:
                await machine.restore(snapshot)
            if config.files:
                await machine.upload_files(config.files)
        except BaseException:
            await machine.delete()
            raise
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

    async def _begin(self, machine: ContainerMachine) -> None:
        answer = await machine.line.ask({"do": "begin", "limits": _limits(machine.config)._asdict()}, _BEGIN_S)
        if "errno" in answer.header:
            await machine.delete()
            raise SandboxError(f"a machine could not be given its limits: errno {answer.header['errno']}")

    async def _run(self, machine: Machine, program: Path, argument: str) -> dict[str, Any]:
        command = [self.host.interpreter, "-I", "-S", "-", argument]
        result = await machine.exec(command, stdin=await asyncio.to_thread(program.read_bytes), timeout_s=_PROBE_S)
        if result.exit_code != 0:
            raise SandboxError(f"the look at a machine's isolation failed: {result.stderr[-500:]}")
        found: dict[str, Any] = json.loads(result.stdout)
        return found


def _limits(config: MachineConfig) -> MachineLimits:
    """The limits with the image's own search path, unless the caller has another."""
    limits = config.limits()
    environment = {name: value for name, value in limits.environment.items() if name != "PATH" or name in config.env}
    return limits._replace(environment=environment)
