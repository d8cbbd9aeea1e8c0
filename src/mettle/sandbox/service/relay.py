"""A TCP stream over a websocket: bytes as binary messages, and "eof" as a text message when one side has said all.

Used by both ends. Invariant: both ways end apart, as those of a socket do; whoever stops reading makes the other wait;
when the websocket goes, so does the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, Final

from aiohttp import WSMsgType

_READ_BYTES: Final = 1 << 16
MAX_MESSAGE: Final = 1 << 20
_EOF: Final = "eof"
_IDLE_S, _BETWEEN_S, _TRIES = 30, 10, 3


async def pump(ws: Any, connection: socket.socket) -> None:
    """Carry bytes both ways until both have ended, or one is cut off. Closes the socket, not the websocket."""
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    outward = asyncio.create_task(_outward(loop, connection, ws), name="port outward")
    inward = asyncio.create_task(_inward(loop, connection, ws), name="port inward")
    try:
        done, _ = await asyncio.wait({outward, inward}, return_when=asyncio.FIRST_COMPLETED)
        if all(task.exception() is None and task.result() for task in done):
            await asyncio.wait({outward, inward})
    finally:
        for task in (outward, inward):
            task.cancel()
        for task in (outward, inward):
            with contextlib.suppress(asyncio.CancelledError, OSError, RuntimeError):
                await task
        connection.close()


async def _outward(loop: asyncio.AbstractEventLoop, connection: socket.socket, ws: Any) -> bool:
    """From the socket; True when it ended in good order."""
    while data := await loop.sock_recv(connection, _READ_BYTES):
        await ws.send_bytes(data)
    await ws.send_str(_EOF)
    return True


async def _inward(loop: asyncio.AbstractEventLoop, connection: socket.socket, ws: Any) -> bool:
    """To the socket; True when it ended in good order."""
    while True:
        message = await ws.receive()
        if message.type is WSMsgType.BINARY:
            await loop.sock_sendall(connection, message.data)
        elif message.type is WSMsgType.TEXT and message.data == _EOF:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            return True
        else:
            return False


def keep_alive(transport: asyncio.BaseTransport | None) -> None:
    """Let the kernel find out within a minute that the other host has gone."""
    connection = transport.get_extra_info("socket") if transport is not None else None
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _TRIES)
