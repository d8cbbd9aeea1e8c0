"""One worker at work, seen from the process that started it.

Parts: `Worker`, `WorkerStats`. Invariants: every request ends, in its answer or in `WorkerDied`; a process that sends
no pulse for `silence_s`, or whose event loop has been blocked for `blocked_s`, is ended, a death like any other.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mettle.envs.workers.spawn import PlaceLost, Spawned, WorkerDied
from mettle.errors import EnvironmentFault
from mettle.processes.frames import Frame, encode, read_frame

logger = logging.getLogger(__name__)

STOP_S = 30.0
"""Time to tear an environment down."""
LATE_S = 1.0
"""Event-loop lag of a worker from which on it is worth a line in the log."""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """How a worker does. `lag_s` is its event loop's worst lag of the last half second, `max_lag_s` since its start."""

    pid: int
    num_running: int
    num_done: int
    lag_s: float
    max_lag_s: float
    max_rss_bytes: int


class Worker:
    """A spawned process whose requests are answered side by side."""

    def __init__(
        self, spawned: Spawned, *, silence_s: float, blocked_s: float, on_death: Callable[[Worker], None]
    ) -> None:
        self._spawned = spawned
        self._silence_s = silence_s
        self._blocked_s = blocked_s
        self._on_death = on_death
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._beats_writer: asyncio.StreamWriter | None = None
        self._last_beat = time.monotonic()
        self._beat: dict[str, Any] = {}
        self._max_lag_s = self._recent_lag_s = 0.0
        self._num_done = 0
        self._verdict = ""
        self.death: WorkerDied | None = None

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._spawned.pid

    @property
    def num_running(self) -> int:
        """Requests without an answer yet."""
        return len(self._waiting)

    @property
    def stats(self) -> WorkerStats:
        """How it does."""
        lag_s, rss = self._beat.get("lag_s", 0.0), self._beat.get("max_rss_kib", 0) * 1024
        return WorkerStats(self.pid, self.num_running, self._num_done, lag_s, self._max_lag_s, rss)

    def take_max_lag_s(self) -> float:
        """The worst lag of its event loop since this was last asked."""
        lag_s, self._recent_lag_s = self._recent_lag_s, 0.0
        return lag_s

    async def start(self) -> None:
        """Begin to listen."""
        reader, self._writer = await _open(self._spawned.connection)
        beats, self._beats_writer = await _open(self._spawned.pulse)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(job) for job in (self._read(reader), self._listen(beats), self._watch())]

    async def request(self, op: str, **fields: Any) -> Frame:
        """Send a request and wait for its answer.

        Raises: WorkerDied when the process is gone; EnvironmentFault when it answers with an error.
        """
        if self.death is not None:
            raise self.death
        assert self._writer is not None, "a worker is started before it is asked"
        number = next(self._ids)
        frame = encode({"op": op, "id": number, **fields})
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(frame)
            found = await answer
        except asyncio.CancelledError:
            self._writer.write(encode({"op": "cancel", "id": number}))
            raise
        finally:
            self._waiting.pop(number, None)
        self._num_done += 1
        if "error" in found:
            raise EnvironmentFault(f"worker {self._spawned.name}: {found['error']}")
        return dict(found)

    async def stop(self) -> None:
        """Let it tear its environment down and end; a process that does not is killed."""
        if self.death is None and self._writer is not None:
            self._on_death = lambda _: None
            with suppress(ConnectionError):
                self._writer.write(encode({"op": "stop"}))
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._tasks[0]
        self._end("was stopped")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (answer := await read_frame(reader)) is not None:
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except Exception as error:
            self._verdict = f"sent what is no answer ({error})"
        how = self._verdict or await asyncio.to_thread(self._spawned.how_it_ended)
        self._end(how)

    async def _listen(self, beats: asyncio.StreamReader) -> None:
        while line := await beats.readline():
            self._last_beat = time.monotonic()
            self._beat = json.loads(line)
            lag_s = self._beat["lag_s"]
            self._max_lag_s, self._recent_lag_s = max(self._max_lag_s, lag_s), max(self._recent_lag_s, lag_s)
            if lag_s > LATE_S:
                logger.warning("a worker's event loop is blocked", extra={"worker": self.pid, "lag_s": round(lag_s, 1)})

    async def _watch(self) -> None:
        pause_s = min(1.0, self._silence_s / 4, self._blocked_s / 4)
        while True:
            asked = time.monotonic()
            await asyncio.sleep(pause_s)
            if time.monotonic() - asked > 2 * pause_s:
                continue  # this very loop stood still, so what the worker has sent is not read yet
            if time.monotonic() - self._last_beat > self._silence_s:
                self._verdict = f"was silent for {self._silence_s:g} s"
            elif self._beat.get("lag_s", 0.0) > self._blocked_s:
                self._verdict = f"had its event loop blocked for {self._blocked_s:g} s"
            if self._verdict:
                self._spawned.kill()
                return

    def _end(self, how: str) -> None:
        """The process is gone: everybody who waits learns it."""
        if self.death is not None:
            return
        kind = PlaceLost if self._spawned.is_place_lost else WorkerDied
        self.death = kind(f"worker {self._spawned.name} {how}")
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        for writer in (self._writer, self._beats_writer):
            if writer is not None:
                writer.close()
        self._spawned.end()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_again(self.death))
        self._on_death(self)


def _again(death: WorkerDied) -> WorkerDied:
    """The same error for one more waiter: an instance raised in several tasks would mix their tracebacks."""
    return type(death)(*death.args)


async def _open(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection.setblocking(False)
    return await asyncio.open_connection(sock=connection)


def rows_as_sent(rows: Any) -> list[dict[str, Any]]:
    """Rows as a frame can hold them."""
    return [dict(row) if isinstance(row, Mapping) else row for row in rows]
