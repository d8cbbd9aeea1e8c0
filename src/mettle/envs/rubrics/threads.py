"""Threads for reward functions that would hold up the event loop.

Parts: `ThreadLane`, a few daemon threads that run one function. Invariants: a call's time counts from when a thread
takes it up, not from when it was queued; a call that overruns is abandoned with its thread, another thread takes the
place, and no abandoned thread keeps the process from ending. A lane serves any event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from mettle.envs.rubrics.values import FAILURES, Overrun

IDLE_S = 60.0
MAX_ABANDONED = 8


class LaneClosed(Exception):
    """Too many calls hung, so that no more are made."""


class _Job:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.started: float | None = None
        self.is_abandoned = False
        self.is_over = False

    def run(self) -> None:
        try:
            value, error = self.context.run(self.function), None
        except BaseException as raised:
            value, error = None, raised
        if not self.is_abandoned:
            with contextlib.suppress(RuntimeError):  # a loop that is closed at this moment: nobody waits any more
                self.loop.call_soon_threadsafe(self._settle, value, error)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        self.future.set_result((value, error))


class ThreadLane:
    """At most `num_threads` calls at a time; one by default, so that a function never runs beside itself."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self.name = name
        self.num_threads = num_threads
        self.num_abandoned = 0
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_alive = 0
        self._num_pending = 0

    async def run(self, function: Callable[[], Any], timeout_s: float | None) -> Any:
        """What `function` returns or raises.

        Raises: Overrun when it takes longer than `timeout_s`; LaneClosed after too many of those.
        """
        if self.num_abandoned >= MAX_ABANDONED:
            raise LaneClosed(f"it hung {self.num_abandoned} times and is not called any more")
        job = _Job(function)
        self._submit(job)
        try:
            while not job.future.done():
                if not await _settled(job, timeout_s):
                    raise Overrun
        finally:
            if not job.future.done():
                self._abandon(job)
        value, error = job.future.result()
        if error is None:
            return value
        raise error if isinstance(error, FAILURES) else RuntimeError(repr(error))

    def _submit(self, job: _Job) -> None:
        with self._lock:
            self._jobs.put(job)
            self._num_pending += 1
            self._grow()

    def _grow(self) -> None:
        if self._num_alive < min(self.num_threads, self._num_pending):
            self._num_alive += 1
            threading.Thread(target=self._serve, name=f"reward {self.name}", daemon=True).start()

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            job.is_abandoned = True
            if job.started is not None and not job.is_over:  # one that is over has left its thread to others
                self.num_abandoned += 1
                self._num_alive -= 1
                self._num_pending -= 1
                self._grow()

    def _is_kept(self, job: _Job) -> bool:
        """Count a job that has ended; False when it was given up, and this thread with it."""
        with self._lock:
            job.is_over = True
            self._num_pending -= not job.is_abandoned
            return not job.is_abandoned

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._num_pending:
                        continue
                    self._num_alive -= 1
                    return
            with self._lock:
                if job.is_abandoned:
                    self._num_pending -= 1
                    continue
                job.started = time.monotonic()
            job.run()
            if not self._is_kept(job):
                return


async def _settled(job: _Job, timeout_s: float | None) -> bool:
    """Wait for `job`; False when it was taken up and its time is over."""
    if timeout_s is None:
        await asyncio.wait({job.future})
        return True
    was_started = job.started
    left = timeout_s if was_started is None else was_started + timeout_s - time.monotonic()
    if left > 0:
        await asyncio.wait({job.future}, timeout=left)
    return job.future.done() or was_started is None or left > 0
