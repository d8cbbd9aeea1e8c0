"""A machine that is a container: a service's machine, whose service is the agent inside."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from mettle.errors import SandboxError
from mettle.sandbox.containers.link import AgentLink
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.egress import PORT, Egress
from mettle.sandbox.machines.endings import MachineLost
from mettle.sandbox.machines.files import Snapshot
from mettle.sandbox.machines.lifetime import Timed
from mettle.sandbox.machines.machine import MAX_ENTRY_BYTES
from mettle.sandbox.service.client.machine import RemoteMachine
from mettle.sandbox.service.faults import ServiceLost
from mettle.sandbox.zygote.settings import CellLimits, MachineLimits, Settings


class Container(Protocol):
    """A container that runs, with its agent ready at the end of `link`."""

    id: str
    link: AgentLink

    async def remove(self) -> None:
        """End and remove it. Doing it twice is harmless."""
        ...


class ContainerMachine(RemoteMachine, Timed):
    """A machine whose end this process sees to. Made by `ContainerPool.create`."""

    def __init__(self, config: MachineConfig, report: IsolationReport, container: Container) -> None:
        Timed.__init__(self, config)
        RemoteMachine.__init__(self, f"m-{secrets.token_hex(6)}", config, report, container.link.connection)
        self.container = container
        self.lost_as: type[MachineLost] = MachineLost
        self.egress: Egress | None = None
        """Its way out, if it was given one: what it was refused, and how much passed."""
        self.on_end: Callable[[ContainerMachine], None] = lambda _: None

    @property
    def is_alive(self) -> bool:
        return not self.why_ended and self.container.link.is_open

    @property
    def is_busy(self) -> bool:
        return super().is_busy or any(not job.following.done() for job in self._jobs)

    async def begin(self) -> None:
        """Give it its limits, with the image's own search path unless the caller has another."""
        limits, env = self.config.limits(), self.config.env
        kept = {name: value for name, value in limits.environment.items() if name != "PATH" or name in env}
        told: MachineLimits = limits._replace(environment=kept)
        try:
            await self._ask("PUT", self._path, json={"limits": told._asdict()})
        except OSError as error:
            raise SandboxError(f"a machine could not be given its limits: {error.strerror}") from error

    async def open_egress(self) -> None:
        """Answer as the proxy that its environment names, if its config lets it reach anything."""
        network = self.config.reach()
        if network is not None:
            self.egress = Egress(network)
            await self.egress.open(await self.listen(PORT))

    async def open_cell(self, settings: Settings, limits: CellLimits | None) -> socket.socket:
        """A connection to a new cell. The container ends with it."""
        params = {"settings": settings.to_json(), "limits": json.dumps(limits and limits._asdict())}
        async with self._attributed():
            return await self._tunnels.open("cells", params)

    async def snapshot(self, paths: Sequence[str] = ("/work",)) -> Snapshot:
        """As `Machine.snapshot`. Raises: OSError, EFBIG for more than its disk can hold."""
        limits, params = self.config.limits(), [("path", path) for path in paths]
        most = limits.disk_bytes + limits.max_files * MAX_ENTRY_BYTES
        return Snapshot(await self._take(f"{self._path}/snapshot", params, most), tuple(paths))

    async def listen(self, port: int = 0) -> socket.socket:
        async with self._attributed():
            return await super().listen(port)

    async def connect(self, port: int, *, timeout_s: float = 10.0) -> socket.socket:
        async with self._attributed():
            return await super().connect(port, timeout_s=timeout_s)

    async def delete(self, why: str = "it was deleted") -> None:
        """End it, and everything in it. Doing it twice is harmless."""
        self.why_ended = self.why_ended or why
        self.on_end(self)
        if self.egress is not None:
            self.egress.close()
        try:
            await self.container.link.close(MachineLost(self.why_ended))
            await self.let_go()
        finally:
            await self.container.remove()

    @contextlib.asynccontextmanager
    async def _attributed(self) -> AsyncIterator[None]:
        """While an order is carried out. One that the end of the machine ends says why that came."""
        if not self.is_alive:
            raise await self._lost()
        try:
            with self.working():
                yield
        except ServiceLost as error:
            if self.is_alive:
                raise SandboxError(f"machine {self.id}: its agent hung up in the middle of an answer") from error
            raise await self._lost() from error

    async def _lost(self) -> MachineLost:
        if not self.why_ended:
            lost = await self.container.link.why_lost()
            if not self.why_ended:
                self.why_ended, self.lost_as = str(lost), type(lost)
        return self.lost_as(f"machine {self.id} has ended: {self.why_ended}", why=self.why_ended)

    async def _ask(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        async with self._attributed():
            return await super()._ask(method, path, **request)

    async def _lines(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        async with self._attributed(), contextlib.aclosing(super()._lines(body)) as lines:
            async for line in lines:
                yield line

    async def _take(self, path: str, params: Any, max_bytes: int) -> bytes:
        """A body, as long as it is not longer than that; an agent that ends it early has met an error inside."""
        received, what = (
            bytearray(),
            " ".join(value for _, value in (params if isinstance(params, list) else params.items())),
        )
        try:
            async with self._attributed(), self.connection.answer("GET", path, params=params) as response:
                async for piece in response.content.iter_any():
                    received += piece
                    if len(received) > max_bytes:
                        raise OSError(errno.EFBIG, f"over {max_bytes} bytes", what)
        except MachineLost:
            raise
        except SandboxError as error:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR), what) from error
        return bytes(received)
