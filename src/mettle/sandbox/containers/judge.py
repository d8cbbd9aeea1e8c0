"""The judge whose cells are containers: one machine for each solution, its tests run by the agent inside.

It is `SandboxPool` with another place to take cells from. Inputs go in and reports come out; what is expected stays
here, and the verdict is made here.
Invariant: a container judges one solution (or compiles one, or asks one checker) and is removed; when a test has
touched its files, the next test gets another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import replace
from typing import Final

from mettle.errors import SandboxError, UserError
from mettle.sandbox.config import LanguageSpec, SandboxConfig
from mettle.sandbox.containers.agent.cells import PROGRAMS
from mettle.sandbox.containers.machine import ContainerMachine
from mettle.sandbox.containers.pool import ContainerHost, ContainerPool
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.judge.cells import CellLost, JudgeCell
from mettle.sandbox.judge.pool import SandboxPool
from mettle.sandbox.judge.request import JudgeRequest
from mettle.sandbox.judge.verdicts import JudgeResult, ProgramChecker
from mettle.sandbox.keeper import TemplateKeeper
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.toolchains import find_language, known_languages
from mettle.sandbox.zygote.settings import CellLimits, Settings

_READY_S: Final = 60.0
_LOOK_S: Final = 20.0
_SPARE_MB: Final = 64
_MAX_DISK_FILES: Final = 1024
_LIFETIME_S: Final = 24 * 3600.0


class RemoteCell(JudgeCell):
    """A cell in a container of its own, which ends with it."""

    machine: ContainerMachine | None = None
    ending: asyncio.Task[None] | None = None

    def close(self) -> None:
        super().close()
        if self.machine is not None and self.ending is None:
            self.ending = asyncio.create_task(self.machine.delete("its cell is done"), name="cell end")


class RemoteCells(TemplateKeeper):
    """There is no template process elsewhere: a cell is lost when its own container is."""

    def __init__(self) -> None:
        self.template = None
        self.num_templates = 0
        self.cells: dict[int, RemoteCell] = {}

    def has_lost(self, generation: int) -> bool:
        return False

    async def kill(self, number: int, generation: int) -> None:
        cell = self.cells.get(number)
        if cell is not None:
            cell.close()


class ContainerJudge(SandboxPool):
    """Judges code in containers. Use as `async with`."""

    def __init__(self, config: SandboxConfig, host: ContainerHost) -> None:
        self._remote = RemoteCells()
        super().__init__(config, self._remote)
        self._machines = ContainerPool(config, host)
        self._numbers = itertools.count(1)
        self._missing: dict[str, str | None] = {}

    async def measure(self) -> IsolationReport:
        return await self._machines.measure()

    async def close(self) -> None:
        await super().close()
        endings = [cell.ending for cell in self._remote.cells.values() if cell.ending is not None]
        if endings:
            await asyncio.wait(endings)
        await self._machines.close()

    async def judge_request(self, request: JudgeRequest) -> JudgeResult:
        """As `SandboxPool.judge_request`; the language's programs are looked for in the image."""
        _ = self.isolation
        await self._require_programs(find_language(self.config, request.language))
        if isinstance(request.checker, ProgramChecker):
            await self._require_programs(find_language(self.config, request.checker.language))
        memory_mb = request.memory_mb
        if isinstance(memory_mb, int) and memory_mb > self._machine_memory_mb:
            raise UserError(
                f"memory_mb is {memory_mb}, and the containers have {self._machine_memory_mb}; raise sandbox.memory_mb"
            )
        return await super().judge_request(request)

    @property
    def _machine_memory_mb(self) -> int:
        """What a solution may use, or the compiler of any language."""
        compilers = [spec.compile_memory_mb for spec in known_languages(self.config).values() if spec.compile]
        return max([self.config.memory_mb, *compilers])

    async def _require_programs(self, spec: LanguageSpec) -> None:
        """Look once, in a machine, for what the language runs. Raises: UserError naming what the image lacks."""
        if spec.is_warm:
            return
        if spec.name not in self._missing:
            self._missing[spec.name] = await self._look_for(spec)
        missing = self._missing[spec.name]
        if missing is not None:
            raise UserError(f"{spec.name} cannot be judged here: the image has no {missing!r}")

    async def _look_for(self, spec: LanguageSpec) -> str | None:
        programs = [command[0] for command in (spec.compile, spec.run) if command and "{" not in command[0]]
        machine = await self._machines.make(MachineConfig(), self.isolation)
        try:
            for program in programs:
                found = await machine.exec(["sh", "-c", 'command -v "$1"', "sh", program], timeout_s=_LOOK_S)
                if found.exit_code != 0:
                    return program
        finally:
            await machine.delete()
        return None

    async def _make_cell(self, limits: CellLimits | None) -> JudgeCell:
        config = self._machine_config(limits)
        machine = await self._machines.make(config, self.isolation)
        try:
            cell = await self._enter(machine, limits)
        except BaseException:
            await machine.delete()
            raise
        self._stats = replace(self._stats, num_cells=self._stats.num_cells + 1)
        return cell

    async def _enter(self, machine: ContainerMachine, limits: CellLimits | None) -> RemoteCell:
        try:
            ours = await machine.open_cell(self._settings(), limits)
        except SandboxError as error:
            raise CellLost("the container ended before its cell was made") from error
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        cell = RemoteCell(next(self._numbers), 0, limits, reader, writer)
        try:
            await cell.wait_ready(_READY_S)
        except BaseException:
            cell.close()
            raise
        cell.machine = machine
        self._forget_ended()
        self._remote.cells[cell.number] = cell
        return cell

    def _forget_ended(self) -> None:
        for number, cell in list(self._remote.cells.items()):
            if cell.ending is not None and cell.ending.done():
                with contextlib.suppress(asyncio.CancelledError):
                    cell.ending.exception()
                del self._remote.cells[number]

    def _machine_config(self, limits: CellLimits | None) -> MachineConfig:
        disk_mb = self.config.disk_mb if limits is None else limits.disk_bytes >> 20
        num_processes = self.config.max_processes if limits is None else limits.max_processes
        return MachineConfig(
            memory_mb=self._machine_memory_mb + _SPARE_MB,
            disk_mb=max(disk_mb, _SPARE_MB),
            max_processes=num_processes,
            lifetime_s=_LIFETIME_S,
        )

    def _settings(self) -> Settings:
        config = self.config
        return Settings(
            control_fd=-1,
            owner_pid=0,
            is_jailed=False,
            is_landlocked=False,
            host_uid=0,
            max_processes=config.max_processes,
            max_open_files=config.max_open_files,
            max_file_bytes=config.disk_mb << 20,
            disk_bytes=config.disk_mb << 20,
            max_disk_files=_MAX_DISK_FILES,
            scratch=PROGRAMS,
            packages=(),
            preload=config.preload,
            host_paths=(),
        )
