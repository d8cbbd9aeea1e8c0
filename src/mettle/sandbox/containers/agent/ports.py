"""Ports inside a container, as websockets: to one that listens, and from one that the owner listens at.

Parts: `PortRoutes`, `carry` (bytes between a websocket and a socket). Invariant: a connection that the owner does not
fetch in time is closed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import socket
from typing import Final, NamedTuple

from mettle.sandbox.containers.agent.commands import read, write
from mettle.sandbox.containers.agent.faults import NoSuch
from mettle.sandbox.containers.agent.http import BINARY, CLOSE, PONG, TEXT, Request, WebSocket
from mettle.sandbox.containers.agent.loop import Loop, LoopEvent, readable, writable
from mettle.sandbox.service.messages import EOF

_BACKLOG: Final = 128
_CONNECT_S: Final = 10.0
_FETCH_S: Final = 30.0
_MAX_PENDING: Final = 256


class Listener(NamedTuple):
    """Connections made inside that the owner has not fetched yet."""

    pending: dict[str, socket.socket]
    numbers: itertools.count[int]


class PortRoutes:
    """The routes to and from ports of the machine."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._listeners: dict[int, Listener] = {}

    async def connect(self, request: Request, text: str) -> None:
        """A websocket to 127.0.0.1:`port` inside."""
        port = int(text)
        connection = socket.socket()
        connection.setblocking(False)
        try:
            number = connection.connect_ex(("127.0.0.1", port))
            if number == errno.EINPROGRESS:
                timeout_s = float(request.one("timeout_s", str(_CONNECT_S)))
                is_made = await writable(connection.fileno(), timeout_s)
                number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if is_made else errno.ETIMEDOUT
            if number:
                raise OSError(number, os.strerror(number), f"port {port}")
            await carry(self._loop, request, connection)
        finally:
            connection.close()

    async def listen(self, request: Request, *words: str) -> None:
        """A websocket that tells of connections to a port inside; or, with its number, one to such a connection."""
        if words:
            await self._fetch(request, *words)
            return
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", int(request.one("port", "0"))))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            await self._tell(request, listener)
        finally:
            listener.close()

    async def _tell(self, request: Request, listener: socket.socket) -> None:
        port = int(listener.getsockname()[1])
        known = self._listeners[port] = Listener({}, itertools.count(1))
        ws = await request.upgrade()
        accepting = self._loop.spawn(self._accept_inside(listener, known, ws))
        try:
            await ws.send(TEXT, json.dumps({"port": port}).encode())
            while (await ws.receive())[0] in (TEXT, BINARY, PONG):
                pass
            await ws.send(CLOSE, b"")
        finally:
            accepting.cancel()
            del self._listeners[port]
            for connection in known.pending.values():
                connection.close()

    async def _accept_inside(self, listener: socket.socket, known: Listener, ws: WebSocket) -> None:
        while True:
            await readable(listener.fileno())
            try:
                connection, _ = listener.accept()
            except OSError:
                continue
            if len(known.pending) >= _MAX_PENDING:
                connection.close()
                continue
            connection.setblocking(False)
            name = str(next(known.numbers))
            known.pending[name] = connection
            self._loop.spawn(_let_go(known, name))
            await ws.send(TEXT, json.dumps({"accept": name}).encode())

    async def _fetch(self, request: Request, port: str, name: str) -> None:
        known = self._listeners.get(int(port))
        connection = known.pending.pop(name, None) if known is not None else None
        if connection is None:
            raise NoSuch(f"port {port} has no connection {name[:20]!r} to fetch")
        with connection:
            await carry(self._loop, request, connection)


async def carry(loop: Loop, request: Request, connection: socket.socket) -> None:
    """Bytes both ways between a websocket and a socket, until both have said all or one is cut off."""
    ws, descriptor = await request.upgrade(), connection.fileno()

    async def outward() -> None:
        while data := await read(descriptor):
            await ws.send(BINARY, data)
        await ws.send(TEXT, EOF.encode())

    sending = loop.spawn(outward())
    try:
        while True:
            kind, data = await ws.receive()
            if kind == BINARY:
                await write(descriptor, data)
            elif kind == TEXT and data == EOF.encode():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
                await sending.ended.wait()
                break
            elif kind == CLOSE:
                break
        await ws.send(CLOSE, b"")
    finally:
        sending.cancel()


async def _let_go(known: Listener, name: str) -> None:
    """A connection that nobody fetches is closed."""
    await LoopEvent().wait(_FETCH_S)
    connection = known.pending.pop(name, None)
    if connection is not None:
        connection.close()
