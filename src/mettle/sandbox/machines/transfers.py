"""Bytes into a machine's files and out of them, by a worker that works inside as the user that the code is.

Invariant: a transfer ends: with its bytes, with the error that the worker met, or, when nothing moves for a minute,
with the worker ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

from mettle.sandbox.machines.endings import MachineLost
from mettle.sandbox.machines.line import Answer, Line, Reader, Writer

_STALL_S: Final = 60.0
_LOOK_S: Final = 0.1
_FIRST_SIGNAL: Final = 133  # error numbers end here


class TransferHost(Protocol):
    """What a transfer needs of its machine."""

    id: str

    @property
    def channel(self) -> Line: ...

    @property
    def is_alive(self) -> bool: ...

    def require_alive(self) -> None: ...

    def working(self) -> contextlib.AbstractContextManager[None]: ...


class Transfers:
    """The transfers of one machine."""

    def __init__(self, host: TransferHost) -> None:
        self._host = host

    async def give(
        self, worker: str, order: dict[str, Any], feed: Callable[[Writer], Awaitable[None]], what: str
    ) -> None:
        """Send a worker its order and bytes, and wait until it has done with them."""
        writer, end = self._host.channel.open_writer(_STALL_S)
        try:
            async with self._worker({"op": worker, "streams": [0], **order}, end, what) as answer:
                with contextlib.suppress(BrokenPipeError):  # the worker has met an error, which its answer names
                    await feed(writer)
                writer.close()
                await _conclude(answer, what)
        finally:
            writer.close()

    async def take(self, worker: str, order: dict[str, Any], what: str, max_bytes: int) -> bytes:
        """Send a worker its order and collect what it sends back."""
        received = bytearray()
        reader, end = self._host.channel.open_reader(received.extend)
        try:
            async with self._worker({"op": worker, "streams": [1], **order}, end, what) as answer:
                await _collect(reader, received, max_bytes, what)
                await _conclude(answer, what)
        finally:
            reader.close()
        return bytes(received)

    @contextlib.asynccontextmanager
    async def _worker(self, order: dict[str, Any], end: int, what: str) -> AsyncIterator[asyncio.Future[Answer]]:
        """A worker at work.

        One that has not answered at the end, because it stalls or is no longer wanted, is ended.
        """
        with self._host.working():
            try:
                self._host.require_alive()
                number, answer = await self._host.channel.order({"do": "start", **order}, [end])
            finally:
                self._host.channel.let_go([end])
            try:
                yield answer
            except TimeoutError as error:
                raise MachineLost(f"machine {self._host.id} got no further with {what} for {_STALL_S:.0f} s") from error
            finally:
                if not answer.done() and self._host.is_alive:
                    await self._host.channel.order({"do": "kill", "target": number})


async def _conclude(answer: asyncio.Future[Answer], what: str) -> None:
    async with asyncio.timeout(_STALL_S):
        header = (await asyncio.shield(answer)).header
    status = int(header.get("errno", header.get("status", 0)))
    if status > _FIRST_SIGNAL:
        raise InterruptedError(errno.EINTR, "ended by a process of the machine, or for lack of memory", what)
    if status:
        raise OSError(status, os.strerror(status), what)


async def _collect(reader: Reader, received: bytearray, max_bytes: int, what: str) -> None:
    """Wait for the end of the stream; OSError when it is too long, TimeoutError when it stalls."""
    num_before, deadline = 0, time.monotonic() + _STALL_S
    while not reader.ended.is_set() and len(received) <= max_bytes:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await reader.ended.wait()
        if len(received) > num_before:
            num_before, deadline = len(received), time.monotonic() + _STALL_S
        if time.monotonic() > deadline:
            raise TimeoutError
    if len(received) > max_bytes:
        raise OSError(errno.EFBIG, f"over {max_bytes} bytes", what)
