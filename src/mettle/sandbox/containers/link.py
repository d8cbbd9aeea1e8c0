"""The owner's end of the one stream to an agent: connections over it, signs of life, and what became of it.

Over these connections the client of a sandbox service speaks to the agent as to any service.
Invariant: when the stream ends, by itself or because the agent is silent, everything that waits is told, once it is
known why; what comes from an agent is data to be checked, and a frame that makes no sense ends the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import aiohttp

from mettle.errors import SandboxError
from mettle.sandbox.containers.agent.mux import PING, Mux
from mettle.sandbox.containers.transports import ChannelConnector, ChannelTransport
from mettle.sandbox.machines.endings import MachineLost
from mettle.sandbox.service.client.access import ServiceAccess
from mettle.sandbox.service.client.connection import ServiceConnection
from mettle.sandbox.service.faults import ServiceLost

logger = logging.getLogger(__name__)

_PING_S: Final = 10.0
_SILENCE_S: Final = 30.0
_OUTCOME_S: Final = 5.0


class ByteStream(Protocol):
    """A stream of bytes to an agent."""

    async def read(self) -> bytes:
        """What has come; empty at the end. Raises: OSError, ValueError for what an agent cannot have sent."""
        ...

    def write(self, data: bytes) -> None:
        """Send it. The windows of the channels keep what waits here small."""
        ...

    async def close(self) -> None:
        """Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class _AgentAccess(ServiceAccess):
    """No token: whoever holds the stream is the owner."""

    connect: Callable[[asyncio.Protocol], None] = lambda _: None

    def connector(self, url: str) -> tuple[str, aiohttp.BaseConnector]:
        return "http://agent", ChannelConnector(self.connect)


class AgentLink:
    """One agent. `outcome` is asked once, when the stream has ended, what became of the container."""

    def __init__(self, stream: ByteStream, name: str, outcome: Callable[[], Awaitable[MachineLost]]) -> None:
        self._stream = stream
        self._outcome = outcome
        self._mux = Mux(self._write)
        self._last_heard = asyncio.get_running_loop().time()
        self._is_hung_up = False
        self.lost: MachineLost | None = None
        self.closed = asyncio.Event()
        self.connection = ServiceConnection(name, _AgentAccess(connect=self._connect), "")
        self._tasks = [
            asyncio.create_task(self._receive(), name="agent receive"),
            asyncio.create_task(self._keep_alive(), name="agent keep-alive"),
        ]

    @property
    def is_open(self) -> bool:
        return not self._is_hung_up and not self.closed.is_set()

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for the agent's first answer. Raises: MachineLost."""
        try:
            await self.connection.ask("GET", "/status", timeout_s=timeout_s)
        except ServiceLost as error:
            if not self.is_open:
                raise await self.why_lost() from error
            raise MachineLost(f"the agent did not answer within {timeout_s:.0f} s") from error
        except SandboxError as error:
            raise MachineLost(f"what answers is not an agent: {error}") from error

    async def why_lost(self) -> MachineLost:
        """Why it has ended, as soon as that is known."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTCOME_S + 1):
                await self.closed.wait()
        return self.lost or MachineLost("the machine ended")

    async def close(self, lost: MachineLost | None = None) -> None:
        """Hang up. Safe to call twice."""
        await self._end(lost or MachineLost("the machine ended"))
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.connection.close()

    def _connect(self, protocol: asyncio.Protocol) -> None:
        if not self.is_open:
            raise aiohttp.ClientConnectionError("the machine ended")
        self._mux.open(lambda mux, number: ChannelTransport(mux, number, protocol))

    def _write(self, data: bytes) -> None:
        if self.is_open:
            self._stream.write(data)

    async def _receive(self) -> None:
        """Take frames until the stream ends; then find out why, and say so to all who wait."""
        try:
            while data := await self._stream.read():
                self._last_heard = asyncio.get_running_loop().time()
                self._mux.feed(data)
        except (OSError, ValueError) as error:
            logger.debug("an agent's stream ended: %s", error)
        is_told = self._is_hung_up
        self._is_hung_up = True
        await self._end(MachineLost("the machine ended") if is_told else await self._ask_outcome())

    async def _ask_outcome(self) -> MachineLost:
        try:
            async with asyncio.timeout(_OUTCOME_S):
                return await self._outcome()
        except Exception as error:
            logger.warning("what became of a machine could not be found out: %s", error)
            return MachineLost("the machine ended")

    async def _end(self, lost: MachineLost) -> None:
        if self.closed.is_set():
            return
        self.lost = lost
        self._is_hung_up = True
        self.closed.set()
        for channel in list(self._mux.channels.values()):
            assert isinstance(channel, ChannelTransport), "this end opens all of them"
            channel.lose(ConnectionResetError("the machine ended"))
        await self._stream.close()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            if asyncio.get_running_loop().time() - self._last_heard > _SILENCE_S:
                logger.warning("an agent has been silent for %.0f s", _SILENCE_S)
                await self._stream.close()
                return
            self._mux.send(PING, 0)
