"""The owner's ends of a command's pipes: what comes out is kept within a limit, what goes in is fed as it is taken.

Invariant: a reader never grows past its limit and never stops reading of itself, so that no command waits for the owner
longer than it takes to read; the descriptors are closed exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Final

_READ_BYTES: Final = 1 << 16
Sink = Callable[[bytes], None]


class PipeReader:
    """Reads a pipe into a sink until its end."""

    def __init__(self, descriptor: int, sink: Sink) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self._loop.add_reader(descriptor, self._on_readable)

    def discard(self) -> None:
        """Go on reading, for the sake of whoever still writes, and keep nothing."""
        self._sink = lambda _: None
        self.resume()

    def pause(self) -> None:
        """Let the writer wait."""
        if not self.ended.is_set():
            self._loop.remove_reader(self._descriptor)

    def resume(self) -> None:
        if not self.ended.is_set():
            self._loop.add_reader(self._descriptor, self._on_readable)

    def drain(self, max_bytes: int) -> None:
        """Take what is there now."""
        while not self.ended.is_set() and max_bytes > 0:
            num_read = self._read()
            if num_read == 0:
                return
            max_bytes -= num_read

    def close(self) -> None:
        if not self.ended.is_set():
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self.ended.set()

    def _on_readable(self) -> None:
        self._read()

    def _read(self) -> int:
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if data:
            self._sink(data)
        else:
            self.close()
        return len(data)


class PipeWriter:
    """Feeds bytes to a pipe as it takes them; TimeoutError when it takes none for `stall_s`."""

    def __init__(self, descriptor: int, stall_s: float | None = None) -> None:
        self._stall_s = stall_s
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    async def write(self, data: bytes) -> None:
        """Write all of it; BrokenPipeError when nobody reads any more."""
        view = memoryview(data)
        while view and not self._is_closed:
            try:
                view = view[os.write(self._descriptor, view[:_READ_BYTES]) :]
            except BlockingIOError:
                await self._wait_writable()

    async def feed(self, data: bytes) -> None:
        """Write all of it, or as much as is wanted, and close."""
        with contextlib.suppress(BrokenPipeError):
            await self.write(data)
        self.close()

    def close(self) -> None:
        if not self._is_closed:
            self._loop.remove_writer(self._descriptor)
            os.close(self._descriptor)
            self._is_closed = True

    async def _wait_writable(self) -> None:
        writable = asyncio.Event()
        self._loop.add_writer(self._descriptor, writable.set)
        try:
            async with asyncio.timeout(self._stall_s):
                await writable.wait()
        finally:
            if not self._is_closed:
                self._loop.remove_writer(self._descriptor)
