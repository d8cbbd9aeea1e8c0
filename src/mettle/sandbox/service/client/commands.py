"""Commands of a remote machine while they run: as a stream, or in the background."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

from mettle.sandbox.machines.commands import Chunk, ExecResult, Job, Output, Stream, StreamName
from mettle.sandbox.service.faults import ServiceLost
from mettle.sandbox.service.wire import unpack
from mettle.web.backoff import Backoff

_WAIT_S: Final = 30.0
_BACKOFF: Final = Backoff(first_s=0.15, max_s=5.0)
_LINES_AHEAD: Final = 16
Ask = Callable[..., Awaitable[dict[str, Any]]]


class RemoteStream(Stream):
    """The output of a command as it comes. What is not read here makes the command wait; leaving ends it."""

    def __init__(self, lines: AsyncGenerator[dict[str, Any], None]) -> None:
        self._items: asyncio.Queue[Chunk | ExecResult | Exception] = asyncio.Queue(_LINES_AHEAD)
        self._result: ExecResult | None = None
        self._is_over = False
        # The command starts now and not when somebody begins to read.
        self._reading = asyncio.create_task(self._read(lines), name="remote stream")

    @property
    def result(self) -> ExecResult | None:
        return self._result

    async def __anext__(self) -> Chunk:
        if self._is_over:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, Chunk):
            return item
        self._is_over = True
        if isinstance(item, Exception):
            raise item
        self._result = item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        if not self._is_over:
            self._is_over, self._result = True, ExecResult(None, "", "")

    async def _read(self, lines: AsyncGenerator[dict[str, Any], None]) -> None:
        try:
            async with contextlib.aclosing(lines):
                is_complete = False
                async for line in lines:
                    is_complete = "result" in line
                    await self._items.put(_item(line))
            if not is_complete:
                raise ServiceLost("the output of a command ended without its result")
        except Exception as error:
            await self._items.put(error)


class RemoteJob(Job):
    """A command in the background of a remote machine. It goes on when the connection does not."""

    def __init__(self, job_id: str, ask: Ask, path: str, is_alive: Callable[[], bool]) -> None:
        self.id = job_id
        self._ask = ask
        self._path = path
        self._is_alive = is_alive
        self.following = asyncio.create_task(self._follow(), name="remote job")
        self.following.add_done_callback(lambda task: task.cancelled() or task.exception())

    def poll(self) -> ExecResult | None:
        return self.following.result() if self.following.done() else None

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        done, _ = await asyncio.wait({self.following}, timeout=timeout_s)
        return self.following.result() if done else None

    async def output(self) -> Output:
        shown = await self._ask("GET", self._path, params={"output": "1"})
        return Output(shown["stdout"], shown["stderr"])

    async def kill(self) -> ExecResult:
        if not self.following.done():
            await self._ask("DELETE", self._path)
        return await asyncio.shield(self.following)

    async def _follow(self) -> ExecResult:
        num_lost = 0
        while True:
            try:
                shown = await self._ask("GET", self._path, params={"wait_s": f"{_WAIT_S:g}"}, timeout_s=2 * _WAIT_S)
                num_lost = 0
            except ServiceLost:
                if not self._is_alive():
                    raise
                await asyncio.sleep(_BACKOFF.wait_s(num_lost))
                num_lost += 1
                continue
            if shown["result"] is not None:
                result: ExecResult = unpack(shown["result"])
                return result


def _item(line: dict[str, Any]) -> Chunk | ExecResult:
    if "result" in line:
        result: ExecResult = unpack(line["result"])
        return result
    [(name, data)] = line.items()
    stream: StreamName = "stderr" if name == "stderr" else "stdout"
    return Chunk(stream, base64.b64decode(data))
