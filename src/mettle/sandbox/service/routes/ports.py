"""Ports of machines over websockets.

`connect`: one websocket is one connection to a server inside. `listen`: the client holds one websocket as long as it
listens; for each connection that a program inside makes, it is told a number there, and fetches that connection with
another websocket. All of them are made by the client, so that a client behind a firewall can offer a server, such as
the model's endpoint, to the code in a machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from mettle.errors import UserError
from mettle.sandbox.service.bodies import Query, Seconds
from mettle.sandbox.service.faults import NoMachine
from mettle.sandbox.service.relay import relay
from mettle.sandbox.service.state import PortListener, record_of, service_of
from mettle.web.app import begin

_FETCH_S: Final = 30.0
_MAX_PENDING: Final = 256

Handler = Callable[[WebSocket], Awaitable[None]]


@dataclass(frozen=True)
class PortSocket:
    """A handler as an ASGI application. What it raises before it accepts is an answer, as of any other route."""

    handler: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            await self.handler(WebSocket(scope, receive, send))


@dataclass
class _Messages:
    """A websocket of the server's, as `relay` takes it."""

    websocket: WebSocket

    async def send(self, data: bytes | str) -> None:
        await (self.websocket.send_text(data) if isinstance(data, str) else self.websocket.send_bytes(data))

    async def receive(self) -> bytes | str | None:
        message = await self.websocket.receive()
        text: str | None = message.get("text")
        data: bytes | None = message.get("bytes")
        return data if text is None else text


class ConnectQuery(Query):
    timeout_s: Seconds = 10.0


async def connect(websocket: WebSocket) -> None:
    """A connection to 127.0.0.1:`port` inside."""
    machine, query = record_of(websocket).machine, ConnectQuery.read(websocket)
    port = _port(websocket.path_params["port"])
    await _carry(websocket, await machine.connect(port, timeout_s=query.timeout_s))


async def listen(websocket: WebSocket) -> None:
    """Listen on `port` inside (0: any): tells `{"port": n}`, then `{"accept": id}` for each connection."""
    record, listeners = record_of(websocket), service_of(websocket).listeners
    listening = await record.machine.listen(_port(websocket.query_params.get("port", "0")))
    port = int(listening.getsockname()[1])
    listener = listeners[record.id, port] = PortListener()
    try:
        await _accept_websocket(websocket)
        await websocket.send_text(json.dumps({"port": port}))
        accepting = asyncio.create_task(_accept(listening, listener, websocket), name="port listener")
        try:
            while (await websocket.receive())["type"] != "websocket.disconnect":
                pass
        finally:
            accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, RuntimeError, WebSocketDisconnect):
                await accepting
    finally:
        listening.close()
        del listeners[record.id, port]
        for connection in listener.pending.values():
            connection.close()


async def fetch(websocket: WebSocket) -> None:
    """One of the connections that `listen` has told of."""
    record, port = record_of(websocket), _port(websocket.path_params["port"])
    name = websocket.path_params["connection"]
    listener = service_of(websocket).listeners.get((record.id, port))
    connection = listener.pending.pop(name, None) if listener is not None else None
    if connection is None:
        raise NoMachine(f"port {port} of machine {record.id} has no connection {name!r} to fetch")
    await _carry(websocket, connection)


async def _accept(listening: socket.socket, listener: PortListener, websocket: WebSocket) -> None:
    loop, numbers = asyncio.get_running_loop(), itertools.count(1)
    listening.setblocking(False)
    while True:
        connection, _ = await loop.sock_accept(listening)
        if len(listener.pending) >= _MAX_PENDING:
            connection.close()
            continue
        name = str(next(numbers))
        listener.pending[name] = connection
        loop.call_later(_FETCH_S, _give_up, listener, name)
        await websocket.send_text(json.dumps({"accept": name}))


def _give_up(listener: PortListener, name: str) -> None:
    connection = listener.pending.pop(name, None)
    if connection is not None:
        connection.close()


async def _carry(websocket: WebSocket, connection: socket.socket) -> None:
    try:
        await _accept_websocket(websocket)
    except BaseException:
        connection.close()
        raise
    await relay(_Messages(websocket), connection)
    with contextlib.suppress(OSError, RuntimeError, WebSocketDisconnect):
        await websocket.close()


async def _accept_websocket(websocket: WebSocket) -> None:
    begin(websocket.scope)
    await websocket.accept()


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise UserError(f"there is no port {text[:20]}; ports go from 1 to 65535, and 0 asks for any that is free")
    return int(text)
