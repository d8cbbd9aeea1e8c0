"""A TCP stream over a websocket: bytes as binary messages, and "eof" as a text message when one side has said all.

Used by both ends. Invariant: both ways end apart, as those of a socket do; whoever stops reading makes the other wait;
when the websocket goes, so does the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final, Protocol

from mettle.sandbox.service.messages import EOF

_READ_BYTES: Final = 1 << 16


class Messages(Protocol):
    """A websocket, of whichever library."""

    async def send(self, data: bytes | str) -> None: ...

    async def receive(self) -> bytes | str | None:
        """The next message; None when there will be no more."""
        ...


async def relay(messages: Messages, connection: socket.socket) -> None:
    """Carry bytes both ways until both have ended, or one is cut off. Closes the socket, not the websocket."""
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    outward = asyncio.create_task(_outward(loop, connection, messages), name="port outward")
    inward = asyncio.create_task(_inward(loop, connection, messages), name="port inward")
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


async def _outward(loop: asyncio.AbstractEventLoop, connection: socket.socket, messages: Messages) -> bool:
    """From the socket; True when it ended in good order."""
    while data := await loop.sock_recv(connection, _READ_BYTES):
        await messages.send(data)
    await messages.send(EOF)
    return True


async def _inward(loop: asyncio.AbstractEventLoop, connection: socket.socket, messages: Messages) -> bool:
    """To the socket; True when it ended in good order."""
    while True:
        message = await messages.receive()
        if isinstance(message, bytes):
            await loop.sock_sendall(connection, message)
        elif message == EOF:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            return True
        else:
            return False
