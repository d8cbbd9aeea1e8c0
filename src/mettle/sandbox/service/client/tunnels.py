"""Ports of remote machines as sockets of this process.

`connect` gives one end of a socket pair whose other end is carried to the machine. `PrivateListener` is a listening
socket that no network and no other user can reach: for each connection that a program inside makes, one is made to it
from here. Invariant: closing the socket closes the port inside; when the service is lost, connections end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import ClientWebSocketResponse, WSMsgType

from mettle.errors import SandboxError
from mettle.sandbox.machines.listeners import FarListener, PrivateListener
from mettle.sandbox.service.client.connection import ServiceConnection
from mettle.sandbox.service.faults import ServiceLost
from mettle.sandbox.service.relay import relay

_HEARTBEAT_S: Final = 20.0


@dataclass
class _Messages:
    """A websocket of the client's, as `relay` takes it."""

    websocket: ClientWebSocketResponse

    async def send(self, data: bytes | str) -> None:
        await (self.websocket.send_str(data) if isinstance(data, str) else self.websocket.send_bytes(data))

    async def receive(self) -> bytes | str | None:
        message = await self.websocket.receive()
        data: bytes | str | None = message.data if message.type in (WSMsgType.BINARY, WSMsgType.TEXT) else None
        return data


class Tunnels:
    """The tunnels of one machine."""

    def __init__(self, connection: ServiceConnection, path: str) -> None:
        self._connection = connection
        self._path = path
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, port: int, timeout_s: float) -> socket.socket:
        """A connection to a port inside. Raises: OSError as `connect` would."""
        return await self.open(f"connect/{port}", {"timeout_s": f"{timeout_s:g}"})

    async def open(self, what: str, params: dict[str, str]) -> socket.socket:
        """A connection to what stands at this path of the machine's."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._spawn(self._carry(f"{self._path}/{what}", theirs, opened, params))
        try:
            await opened
        except BaseException:
            task.cancel()
            ours.close()
            raise
        return ours

    async def listen(self, port: int) -> FarListener:
        """A listener at a port inside. Raises: OSError as `listen` would."""
        opened: asyncio.Future[FarListener] = asyncio.get_running_loop().create_future()
        task = self._spawn(self._offer(port, opened))
        try:
            listener = await opened
        except BaseException:
            task.cancel()
            raise
        loop = asyncio.get_running_loop()

        def cancel() -> None:  # whoever closes it may be another thread, or a loop that has ended
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)

        listener.on_close = cancel
        return listener

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="sandbox tunnel")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _carry(
        self, path: str, ours: socket.socket, opened: asyncio.Future[None] | None, params: dict[str, str]
    ) -> None:
        try:
            async with self._connection.websocket(path, params=params) as ws:
                if opened is not None and not opened.done():
                    opened.set_result(None)
                await relay(_Messages(ws), ours)
        except (SandboxError, OSError) as error:
            if opened is not None and not opened.done():
                opened.set_exception(error)
        finally:
            ours.close()

    async def _offer(self, port: int, opened: asyncio.Future[FarListener]) -> None:
        try:
            listener = PrivateListener.make()
            try:
                await self._accept(port, listener, opened)
            finally:
                listener.retire()
                if not opened.done() or opened.exception() is not None:
                    listener.close()
        except (SandboxError, OSError) as error:
            if not opened.done():
                opened.set_exception(error)

    async def _accept(self, port: int, listener: PrivateListener, opened: asyncio.Future[FarListener]) -> None:
        path, params = f"{self._path}/listen", {"port": str(port)}
        async with self._connection.websocket(path, params=params, heartbeat_s=_HEARTBEAT_S) as ws:
            listener.inside_port = int((await _told(ws))["port"])
            opened.set_result(listener)
            while True:
                name = (await _told(ws))["accept"]
                ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                ours.setblocking(False)
                try:
                    await asyncio.get_running_loop().sock_connect(ours, listener.address)
                except OSError:  # nobody listens here any more
                    ours.close()
                    continue
                self._spawn(self._carry(f"{path}/{listener.inside_port}/{name}", ours, None, {}))


async def _told(ws: ClientWebSocketResponse) -> dict[str, Any]:
    message = await ws.receive()
    if message.type is not WSMsgType.TEXT:
        raise ServiceLost("the service has ended a listener")
    told: dict[str, Any] = message.json()
    return told
