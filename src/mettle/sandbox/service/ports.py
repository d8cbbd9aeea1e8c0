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
import socket
from dataclasses import dataclass, field
from typing import Final

from aiohttp import WSMsgType, web

from mettle.errors import UserError
from mettle.sandbox.service.bodies import seconds
from mettle.sandbox.service.faults import NoMachine
from mettle.sandbox.service.relay import MAX_MESSAGE, keep_alive, pump
from mettle.sandbox.service.state import record_of

_FETCH_S: Final = 30.0
_HEARTBEAT_S: Final = 20.0
_MAX_PENDING: Final = 256


@dataclass
class _Listener:
    """Connections that have been made inside and not been fetched yet."""

    pending: dict[str, socket.socket] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


LISTENERS: web.AppKey[dict[tuple[str, int], _Listener]] = web.AppKey("listeners")


async def connect(request: web.Request) -> web.StreamResponse:
    """A connection to 127.0.0.1:`port` inside."""
    timeout_s = seconds({"timeout_s": _number(request.query.get("timeout_s", "10"))}, "timeout_s", 10.0) or 10.0
    connection = await record_of(request).machine.connect(_port(request.match_info["port"]), timeout_s=timeout_s)
    return await _carry(request, connection)


async def listen(request: web.Request) -> web.StreamResponse:
    """Listen on `port` inside (0: any): tells `{"port": n}`, then `{"accept": id}` for each connection."""
    record = record_of(request)
    listening = await record.machine.listen(_port(request.query.get("port", "0")))
    port = int(listening.getsockname()[1])
    listener = request.app[LISTENERS][record.id, port] = _Listener()
    ws = web.WebSocketResponse(heartbeat=_HEARTBEAT_S, max_msg_size=MAX_MESSAGE, compress=False)
    try:
        await ws.prepare(request)
        await ws.send_json({"port": port})
        accepting = asyncio.create_task(_accept(listening, listener, ws), name="port listener")
        try:
            while (await ws.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
                pass
        finally:
            accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await accepting
    finally:
        listening.close()
        del request.app[LISTENERS][record.id, port]
        for connection in listener.pending.values():
            connection.close()
    return ws


async def fetch(request: web.Request) -> web.StreamResponse:
    """One of the connections that `listen` has told of."""
    record, port, name = record_of(request), _port(request.match_info["port"]), request.match_info["connection"]
    listener = request.app[LISTENERS].get((record.id, port))
    connection = listener.pending.pop(name, None) if listener is not None else None
    if connection is None:
        raise NoMachine(f"port {port} of machine {record.id} has no connection {name!r} to fetch")
    return await _carry(request, connection)


async def _accept(listening: socket.socket, listener: _Listener, ws: web.WebSocketResponse) -> None:
    loop = asyncio.get_running_loop()
    listening.setblocking(False)
    while True:
        connection, _ = await loop.sock_accept(listening)
        if len(listener.pending) >= _MAX_PENDING:
            connection.close()
            continue
        name = str(next(listener.numbers))
        listener.pending[name] = connection
        loop.call_later(_FETCH_S, _give_up, listener, name)
        await ws.send_json({"accept": name})


def _give_up(listener: _Listener, name: str) -> None:
    connection = listener.pending.pop(name, None)
    if connection is not None:
        connection.close()


async def _carry(request: web.Request, connection: socket.socket) -> web.WebSocketResponse:
    ws = web.WebSocketResponse(max_msg_size=MAX_MESSAGE, compress=False)
    try:
        await ws.prepare(request)
        keep_alive(request.transport)
    except BaseException:
        connection.close()
        raise
    await pump(ws, connection)
    with contextlib.suppress(OSError, RuntimeError):
        await ws.close()
    return ws


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise UserError(f"there is no port {text[:20]}; ports go from 1 to 65535, and 0 asks for any that is free")
    return int(text)
