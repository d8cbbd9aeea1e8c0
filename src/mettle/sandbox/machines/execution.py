"""One command in a machine, from its order to its result: the pipes, the deadline, and the task that sees to its end.

Invariant: whatever the command does is a result; SandboxError says that the machine itself is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from mettle.sandbox.machines.capture import OutputCapture
from mettle.sandbox.machines.commands import Chunk, CommandSpec, ExecResult, Output, StreamName
from mettle.sandbox.machines.endings import MachineLost
from mettle.sandbox.machines.line import Answer, Line, Reader, Writer

_KILL_GRACE_S: Final = 10.0
_FLOOD_BYTES: Final = 64 << 20
_DRAIN_BYTES: Final = 1 << 20  # a pipe cannot hold more
_CANNOT_RUN: Final = 126
_KILLED: Final = 128 + 9


class CommandHost(Protocol):
    """What an execution needs of its machine."""

    @property
    def channel(self) -> Line: ...

    def keep_draining(self, readers: Sequence[Reader]) -> None: ...

    def num_killed_by_kernel(self) -> int: ...

    async def force_end(self, why: str) -> None: ...


class Execution:
    """One command while it runs."""

    def __init__(self, host: CommandHost, command: CommandSpec, *, has_flood_limit: bool) -> None:
        """`has_flood_limit`: end it when it writes far more than anyone will see."""
        self._host = host
        self._command = command
        self._has_flood_limit = has_flood_limit
        self._captures: dict[StreamName, OutputCapture] = {
            "stdout": OutputCapture(command.max_output_bytes),
            "stderr": OutputCapture(command.max_output_bytes),
        }
        self._readers: list[Reader] = []
        self._stop = asyncio.Event()
        self._started = time.monotonic()
        self._num_killed_before = host.num_killed_by_kernel()
        self.on_chunk: Callable[[Chunk], None] | None = None
        self.task = asyncio.create_task(self._run(), name="machine command")

    def stop(self) -> None:
        """End the command and everything that it has started."""
        self._stop.set()

    def output(self) -> Output:
        return Output(self._captures["stdout"].text(), self._captures["stderr"].text())

    def pause(self) -> None:
        for reader in self._readers:
            reader.pause()

    def resume(self) -> None:
        for reader in self._readers:
            reader.resume()

    async def result(self) -> ExecResult:
        """Wait for the end; a caller that is cancelled takes the command along."""
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            self.stop()
            raise

    async def _run(self) -> ExecResult:
        feeder: asyncio.Task[None] | None = None
        try:
            number, answer, writer = await self._start()
            if writer is not None and self._command.stdin is not None:
                feeder = asyncio.create_task(writer.feed(self._command.stdin), name="machine command input")
            is_timed_out, is_ended_by_us = await self._wait(number, answer)
            header = (await answer).header
            for reader in self._readers:
                reader.drain(_DRAIN_BYTES)
        except BaseException:
            for reader in self._readers:
                reader.close()
            raise
        finally:
            if feeder is not None:
                feeder.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await feeder
                if writer is not None:
                    writer.close()
        self._host.keep_draining([reader for reader in self._readers if not reader.ended.is_set()])
        return self._describe(header, is_timed_out=is_timed_out, is_ended_by_us=is_ended_by_us)

    async def _start(self) -> tuple[int, asyncio.Future[Answer], Writer | None]:
        """Send the order with one end of each pipe, which stays open as long as anyone in the machine holds it."""
        command, has_stdin = self._command, self._command.stdin is not None
        line = self._host.channel
        out = line.open_reader(lambda data: self._take("stdout", data))
        err = line.open_reader(lambda data: self._take("stderr", data))
        fed = line.open_writer() if has_stdin else None
        self._readers = [out.reader, err.reader]
        ends = [out.end, err.end] + ([fed.end] if fed else [])
        order: dict[str, Any] = {
            "do": "start",
            "op": "run",
            "streams": [1, 2, 0][: len(ends)],
            "argv": command.argv,
            "cwd": command.cwd,
            "environment": dict(command.env),
        }
        try:
            number, answer = await line.order(order, ends)
        except BaseException:
            if fed is not None:
                fed.writer.close()
            raise
        finally:
            line.let_go(ends)
        return number, answer, fed.writer if fed else None

    def _take(self, stream: StreamName, data: bytes) -> None:
        capture = self._captures[stream]
        capture.add(data)
        if self._has_flood_limit and capture.num_bytes > self._command.max_output_bytes + _FLOOD_BYTES:
            self.stop()
        if self.on_chunk is not None:
            self.on_chunk(Chunk(stream, data))

    async def _wait(self, number: int, answer: asyncio.Future[Answer]) -> tuple[bool, bool]:
        """Until the command has ended, by itself or by us: whether it ran out of time, and whether we ended it."""
        stopped = asyncio.create_task(self._stop.wait(), name="machine command stop")
        try:
            first: list[asyncio.Future[Any]] = [answer, stopped]
            await asyncio.wait(first, timeout=self._left_s(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if answer.done():
            return False, False
        is_timed_out = not self._stop.is_set()
        await self._host.channel.order({"do": "kill", "target": number})
        done, _ = await asyncio.wait({answer}, timeout=_KILL_GRACE_S)
        if not done:
            await self._host.force_end("a command in it could not be ended")
            raise MachineLost("a command in the machine could not be ended, so the machine was")
        return is_timed_out, True

    def _left_s(self) -> float | None:
        if self._command.timeout_s is None:
            return None
        return max(0.0, self._started + self._command.timeout_s - time.monotonic())

    def _describe(self, header: Mapping[str, Any], *, is_timed_out: bool, is_ended_by_us: bool) -> ExecResult:
        stdout, stderr = self.output()
        if "errno" in header:
            return ExecResult(
                _CANNOT_RUN, stdout, f"no process could be started: {os.strerror(int(header['errno']))}\n"
            )
        return ExecResult(
            exit_code=None if is_ended_by_us else int(header["status"]),
            stdout=stdout,
            stderr=stderr,
            is_timed_out=is_timed_out,
            is_truncated=any(capture.is_truncated for capture in self._captures.values()),
            duration_s=time.monotonic() - self._started,
            is_out_of_memory=header["is_out_of_memory"] is True
            or (header["status"] == _KILLED and self._host.num_killed_by_kernel() > self._num_killed_before),
        )
