"""A command as its owner holds it while it runs: in the background, or with its output handed over piece by piece."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from mettle.sandbox.machines.commands import Chunk, ExecResult, Job, Output, Stream
from mettle.sandbox.machines.execution import Execution

_STREAM_AHEAD_BYTES: Final = 1 << 20


class LocalJob(Job):
    def __init__(self, job_id: str, execution: Execution) -> None:
        self.id = job_id
        self._execution = execution

    def poll(self) -> ExecResult | None:
        return self._execution.task.result() if self._execution.task.done() else None

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        done, _ = await asyncio.wait({self._execution.task}, timeout=timeout_s)
        return self._execution.task.result() if done else None

    async def output(self) -> Output:
        await asyncio.sleep(0)
        return self._execution.output()

    async def kill(self) -> ExecResult:
        self._execution.stop()
        await asyncio.wait({self._execution.task})
        return self._execution.task.result()


class LocalStream(Stream):
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
        task = self._execution.task
        return task.result() if task.done() else None

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
        self._execution.stop()
        await asyncio.wait({self._execution.task})

    def _add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._num_ahead += len(chunk.data)
        if self._num_ahead > _STREAM_AHEAD_BYTES:
            self._execution.pause()  # whoever reads decides how fast it may write
        self._news.set()
