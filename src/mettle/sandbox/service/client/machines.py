"""The pool of machines of other hosts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from types import TracebackType
from typing import Any, Self

from mettle.errors import SandboxError
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.files import Snapshot, fill
from mettle.sandbox.service.client.access import ServiceAccess
from mettle.sandbox.service.client.fleet import Fleet, Member
from mettle.sandbox.service.client.machine import RemoteMachine, machine_request


class RemoteMachines:
    """Machines at the services of a config. Use as `async with RemoteMachines(config) as machines`."""

    def __init__(
        self, config: SandboxConfig, *, access: ServiceAccess | None = None, rng: random.Random | None = None
    ) -> None:
        """`access` in place of the environment's token; `rng` decides between services that are equally busy."""
        self.config = config
        self._fleet = Fleet(config, "machines", self._hear, access=access, rng=rng)
        self._machines: dict[str, RemoteMachine] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def isolation(self) -> IsolationReport:
        """What the services measured; with several, of the one that gives the least."""
        return self._fleet.isolation

    @property
    def machines(self) -> tuple[RemoteMachine, ...]:
        """Those that have not ended, as far as is known here."""
        return tuple(machine for machine in self._machines.values() if machine.is_alive)

    def get(self, machine_id: str) -> RemoteMachine:
        """A machine of this pool by its id; SandboxError when there is none."""
        machine = self._machines.get(machine_id)
        if machine is None or not machine.is_alive:
            raise SandboxError(f"there is no machine {machine_id!r}; it has ended, or never was")
        return machine

    async def __aenter__(self) -> Self:
        try:
            await self._fleet.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def create(self, config: MachineConfig | None = None, *, snapshot: Snapshot | None = None) -> RemoteMachine:
        """A new machine at the least busy service, with its first files in place."""
        _ = self.isolation  # says that it has not been started
        config = config or MachineConfig()
        config.limits()  # says what is wrong with the environment, before anything is sent
        machine = await self._make(config)
        await fill(machine, config.files, snapshot)
        return machine

    async def close(self) -> None:
        """End every machine of this pool. Safe to call twice."""
        machines, self._machines = list(self._machines.values()), {}
        for task in self._ending:
            task.cancel()
        for machine in machines:
            machine.end("its pool was closed")
        await self._fleet.leave()
        for machine in machines:
            await machine.let_go()
        await self._fleet.close()

    async def _make(self, config: MachineConfig) -> RemoteMachine:
        key, body = secrets.token_hex(16), machine_request(config)

        async def ask(member: Member) -> RemoteMachine:
            try:
                told = await member.connection.ask("POST", "/machines", json=body, key=key)
            except asyncio.CancelledError:
                member.abandoned.append(key)
                raise
            if key in member.abandoned:  # lost before, and adopted now
                member.abandoned.remove(key)
            member.load["num_machines"] = member.load.get("num_machines", 0) + 1  # until the service says how many
            report = await member.connection.report(told["isolation"])
            return RemoteMachine(str(told["id"]), config, report, member.connection)

        machine = await self._fleet.run(ask, on_move=lambda member: member.abandoned.append(key))
        self._machines[machine.id] = machine
        return machine

    def _hear(self, member: Member, news: dict[str, Any]) -> None:
        """What a service says about this client's machines there."""
        there, ended = set(news["machines"]), news["ended"]
        for machine in list(self._machines.values()):
            if machine.connection is not member.connection:
                continue
            if machine.id in there:
                if machine.is_left:
                    self._end_left(machine)
                continue
            if machine.is_alive:
                machine.end(ended.get(machine.id, news.get("why", "its service was started anew")))
            del self._machines[machine.id]

    def _end_left(self, machine: RemoteMachine) -> None:
        """Its service did not answer when it was to end it, and does now."""
        machine.is_left = False

        async def end() -> None:
            with contextlib.suppress(SandboxError):
                await machine.end_there()

        task = asyncio.create_task(end(), name="end a machine that was left")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
