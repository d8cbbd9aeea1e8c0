"""The owner's ends of an agent's streams, and how a socket of this process is joined to one.

Invariant: no more than a window of bytes waits on this side for somebody who does not take them; credit is given for
what has been taken, and for nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from mettle.sandbox.containers.agent.streams import WINDOW_BYTES
from mettle.sandbox.machines.line import Sink

_PIECE_BYTES: Final = 1 << 16


class Send(Protocol):
    """Puts a frame on its way."""

    def __call__(self, header: dict[str, Any], payload: bytes = b"") -> None: ...


class FarReader:
    """Takes what a stream brings into a sink, until its end."""

    def __init__(self, number: int, sink: Sink, send: Send) -> None:
        self._number = number
        self._sink = sink
        self._send = send
        self._held: deque[bytes] = deque()
        self._num_held = 0
        self._num_taken = 0  # since credit was last given
        self._is_paused = False
        self._has_all = False
        self._is_closed = False
        self.ended = asyncio.Event()

    def set_sink(self, sink: Sink) -> None:
        """Where it goes from now on."""
        self._sink = sink

    def receive(self, data: bytes) -> None:
        """A frame of the stream. Raises: ValueError for more than the agent was allowed."""
        if self._is_closed:
            return
        if self._is_paused:
            self._num_held += len(data)
            if self._num_held > WINDOW_BYTES + (1 << 20):  # what a command left in its pipes comes beyond the window
                raise ValueError("an agent sends more than it was allowed")
            self._held.append(data)
        else:
            self._take(data)

    def finish(self) -> None:
        """The stream has ended: nothing more comes."""
        self._has_all = True
        if not self._held:
            self.ended.set()

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.drain(self._num_held)

    def discard(self) -> None:
        if self.ended.is_set():
            return
        self._sink = lambda _: None
        self._send({"discard": self._number})
        self.resume()

    def drain(self, max_bytes: int) -> None:
        while self._held and max_bytes > 0:
            data = self._held.popleft()
            self._num_held -= len(data)
            max_bytes -= len(data)
            self._take(data)
        if self._has_all and not self._held:
            self.ended.set()

    def close(self) -> None:
        if not self._is_closed and not self.ended.is_set():
            self._send({"drop": self._number})
        self._is_closed = True
        self._held.clear()
        self.ended.set()

    def _take(self, data: bytes) -> None:
        self._sink(data)
        self._num_taken += len(data)
        if self._num_taken >= WINDOW_BYTES // 4:
            self._send({"credit": self._number, "bytes": self._num_taken})
            self._num_taken = 0


class FarWriter:
    """Feeds a stream as the other end takes it."""

    def __init__(self, number: int, send: Send, drain: Callable[[], Awaitable[None]], stall_s: float | None) -> None:
        self._number = number
        self._send = send
        self._drain = drain
        self._stall_s = stall_s
        self._credit = WINDOW_BYTES
        self._changed = asyncio.Event()
        self._is_closed = False
        self._is_dropped = False

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            while not self._credit and not self._is_dropped and not self._is_closed:
                self._changed.clear()
                async with asyncio.timeout(self._stall_s):
                    await self._changed.wait()
            if self._is_dropped:
                raise BrokenPipeError("nobody reads in the machine any more")
            if self._is_closed:
                return
            piece = view[: min(_PIECE_BYTES, self._credit)]
            self._credit -= len(piece)
            view = view[len(piece) :]
            self._send({"data": self._number}, bytes(piece))
            await self._drain()

    async def feed(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            await self.write(data)
        self.close()

    def close(self) -> None:
        if not self._is_closed and not self._is_dropped:
            self._send({"end": self._number})
        self._is_closed = True
        self._changed.set()

    def add_credit(self, num_bytes: int) -> None:
        self._credit += num_bytes
        self._changed.set()

    def drop(self) -> None:
        """Nobody reads any more."""
        self._is_dropped = True
        self._changed.set()


async def carry(ours: socket.socket, reader: FarReader, writer: FarWriter) -> None:
    """Join a socket of this process to a stream, both ways, until both have ended; then close it."""
    loop = asyncio.get_running_loop()
    arrived: deque[bytes] = deque()
    news = asyncio.Event()

    def take(data: bytes) -> None:
        arrived.append(data)
        reader.pause()  # one piece at a time: what comes meanwhile waits within the window
        news.set()

    async def inward() -> None:
        try:
            while data := await loop.sock_recv(ours, _PIECE_BYTES):
                await writer.write(data)
        except OSError:
            pass
        writer.close()

    async def outward() -> None:
        ending = asyncio.ensure_future(reader.ended.wait())
        ending.add_done_callback(lambda _: news.set())
        try:
            while True:
                while arrived:
                    await loop.sock_sendall(ours, arrived.popleft())
                    reader.resume()
                if reader.ended.is_set() and not arrived:
                    break
                news.clear()
                await news.wait()
            ours.shutdown(socket.SHUT_WR)
        except OSError:
            reader.close()
        finally:
            ending.cancel()

    reader.set_sink(take)
    reader.resume()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(inward(), name="agent socket in")
            group.create_task(outward(), name="agent socket out")
    finally:
        reader.close()
        writer.close()
        ours.close()
