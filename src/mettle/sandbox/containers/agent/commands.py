"""One command in a container, from its order to its result, and bytes into and out of the other ops.

Invariant: whatever a command does is a result; the result is there after all output that the command has left in its
pipes; a reader that does not take the output as it comes makes the command wait.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from mettle.sandbox.containers.agent.loop import Loop, LoopEvent, Task, readable, writable
from mettle.sandbox.machines.capture import OutputCapture

_READ_BYTES: Final = 1 << 16
_PIPE_BYTES: Final = 1 << 20  # no pipe holds more
_FLOOD_BYTES: Final = 64 << 20
_KILL_GRACE_S: Final = 10.0
_STALL_S: Final = 60.0
_MAX_DRAINED: Final = 64
_CANNOT_RUN: Final = 126

Sink = Callable[[str, bytes], Awaitable[None]]


class Op:
    """An op that process 1 has started: its number, and how it ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = LoopEvent()
        self.answer: dict[str, Any] = {}


class Host(Protocol):
    """What a command, or another op, needs of process 1."""

    loop: Loop
    drained: deque[Task]

    def start_op(self, order: dict[str, Any], streams: list[int]) -> tuple[Op, list[int]]:
        """Start an op with a pipe for each stream; our ends of them. Raises: OSError."""
        ...

    def kill_op(self, op: Op) -> None: ...

    def give_up(self, why: str) -> None:
        """End the machine."""
        ...


class Command:
    """One command while it runs, and afterwards. `on_chunk` is told of output as it comes."""

    def __init__(
        self, host: Host, order: dict[str, Any], *, on_chunk: Sink | None = None, has_flood_limit: bool = False
    ) -> None:
        self._host = host
        self._order = order
        self._on_chunk = on_chunk
        self._most = order["max_output_bytes"] + _FLOOD_BYTES if has_flood_limit else None
        self.captures = {name: OutputCapture(order["max_output_bytes"]) for name in ("stdout", "stderr")}
        self._began = time.monotonic()
        self._is_stopped = self._is_over = False
        self.ended = LoopEvent()
        self.result: dict[str, Any] = {}
        self._task = host.loop.spawn(self._run())

    def stop(self) -> None:
        """End the command and everything that it has started."""
        self._is_stopped = True
        self._task.wake(False)

    async def _run(self) -> None:
        command, stdin = self._order["command"], self._order["stdin"]
        order = {
            "op": "run",
            "argv": ["sh", "-c", command] if isinstance(command, str) else command,
            "cwd": self._order["cwd"],
            "environment": self._order["env"],
        }
        try:
            op, (out, err, *fed) = self._host.start_op(order, [1, 2] + [0] * (stdin is not None))
        except OSError as error:
            text = f"no process could be started: {error.strerror}\n"
            self._settle({"exit_code": _CANNOT_RUN, "stderr": text})
            return
        pumps = [self._host.loop.spawn(self._pump(*pair)) for pair in (("stdout", out), ("stderr", err))]
        feeder = self._host.loop.spawn(feed(fed[0], stdin)) if fed else None
        is_ended_by_us = is_timed_out = False
        if self._is_stopped or not await op.ended.wait(self._order["timeout_s"]):
            is_ended_by_us, is_timed_out = True, not self._is_stopped
            self._host.kill_op(op)
            if not await op.ended.wait(_KILL_GRACE_S):
                self._host.give_up("a command in the machine could not be ended")
        if feeder is not None:
            feeder.cancel()
        self._is_over = True
        for pump in pumps:
            if pump.waits_for is not None and pump.waits_for.descriptor >= 0:
                pump.wake(False)
        for pump in pumps:
            while not pump.ended.is_set:
                await pump.ended.wait()
        self._settle(
            {
                "exit_code": None if is_ended_by_us else op.answer["status"],
                "is_timed_out": is_timed_out,
                "is_out_of_memory": op.answer["is_out_of_memory"],
            }
        )

    def _settle(self, how: dict[str, Any]) -> None:
        self.result = {
            "$record": "ExecResult",
            **{name: capture.text() for name, capture in self.captures.items()},
            "is_truncated": any(capture.is_truncated for capture in self.captures.values()),
            "duration_s": time.monotonic() - self._began,
            **how,
        }
        self.ended.set()

    async def _pump(self, name: str, descriptor: int) -> None:
        """Read a stream to its end, or until the command has ended and what it left is read."""
        left = _PIPE_BYTES
        while left > 0:
            try:
                data = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                if self._is_over:
                    break
                await readable(descriptor)
                continue
            except OSError:
                data = b""
            if not data:
                os.close(descriptor)
                return
            left -= len(data) * self._is_over
            capture = self.captures[name]
            capture.add(data)
            if self._most is not None and capture.num_bytes > self._most and not self._is_stopped:
                self.stop()
            if self._on_chunk is not None:
                await self._on_chunk(name, data)
        # What it has left in the background may go on printing, and nobody keeps it.
        drained = self._host.drained
        drained.append(self._host.loop.spawn(_discard(descriptor)))
        while len(drained) > _MAX_DRAINED:
            drained.popleft().cancel()


async def _discard(descriptor: int) -> None:
    try:
        while await read(descriptor):
            pass
    finally:
        os.close(descriptor)


async def read(descriptor: int) -> bytes:
    """What can be read, at least a byte; nothing at the end."""
    while True:
        try:
            return os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            await readable(descriptor)
        except OSError:
            return b""


async def write(descriptor: int, data: bytes) -> None:
    """Write all of it. Raises: OSError, and TimeoutError when nobody takes it for a minute."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            if not await writable(descriptor, _STALL_S):
                raise TimeoutError(f"nothing was taken for {_STALL_S:.0f} s") from None


async def feed(descriptor: int, data: bytes) -> None:
    """Write all of it, or as much as is wanted, and close."""
    try:
        while data:
            try:
                data = data[os.write(descriptor, data[:_PIPE_BYTES]) :]
            except BlockingIOError:
                await writable(descriptor)
    except OSError:
        pass
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
