"""A command as its owner holds it while it runs: in the background, or with its output handed over piece by piece."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Final, Self

from mettle.sandbox.machines.execution import Chunk, ExecResult, Execution, Output

_STREAM_AHEAD_BYTES: Final = 1 << 20


class Job:
    """A command in the background; it ends by itself, by its time limit, by `kill`, or with its machine."""

    def __init__(self, job_id: str, execution: Execution) -> None:
        self.id = job_id
        self._execution = execution

    def poll(self) -> ExecResult | None:
        """The result, or None while it runs."""
        return self._execution.task.result() if self._execution.task.done() else None

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        """Wait for the result; None when it still runs after `timeout_s`."""
        done, _ = await asyncio.wait({self._execution.task}, timeout=timeout_s)
        return self._execution.task.result() if done else None

    async def output(self) -> Output:
        """What it has written so far."""
        await asyncio.sleep(0)
        return self._execution.output()

    async def kill(self) -> ExecResult:
        """End it, and everything that it has started."""
        self._execution.stop()
        await asyncio.wait({self._execution.task})
        return self._execution.task.result()


class Stream:
    """The output of a command as it comes: `async for chunk in stream`; afterwards `result` is how it ended.

    Leaving the loop early and closing the stream (or the `async with` around it) ends the command.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._chunks: deque[Chunk] = deque()
        self._num_ahead = 0
        self._news = asyncio.Event()
        execution.on_chunk = self._add
        execution.task.add_done_callback(lambda _: self._news.set())

    @property
    def result(self) -> ExecResult | None:
        """How the command ended; None while it runs."""
        task = self._execution.task
        return task.result() if task.done() else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if self._execution.task.done():
                self._execution.task.result()
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        chunk = self._chunks.popleft()
        self._num_ahead -= len(chunk.data)
        if self._num_ahead <= _STREAM_AHEAD_BYTES // 2:
            self._execution.resume()
        return chunk

    async def aclose(self) -> None:
        """End the command if it still runs."""
        self._execution.stop()
        await asyncio.wait({self._execution.task})

    def _add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._num_ahead += len(chunk.data)
        if self._num_ahead > _STREAM_AHEAD_BYTES:
            self._execution.pause()  # whoever reads decides how fast it may write
        self._news.set()
