"""Warm processes for scoring that is CPU-heavy or may hang: a pool that kills what overruns and replaces it.

Parts: `ScoringProcesses`, `shared_processes` (one pool per purpose), `WorkerFailed`. The other side is
`mettle.envs.rubrics.worker`.
Invariants: a call's time counts from when a worker begins with it, imports not included, and is kept twice: by the
worker in CPU seconds, so that a busy machine makes no false timeouts, and by this side in wall time, for what does not
listen; no worker outlives this process, however it ends; a forked child never touches its parent's workers.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import pickle
import queue
import select
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mettle.envs.rubrics.values import Overrun
from mettle.processes.child import ChildProcess, how_it_ended, python_module
from mettle.processes.frames import HEADER, lengths_of, pack

IDLE_S = 120.0
LOAD_TIMEOUT_S = 120.0
DEFAULT_TIMEOUT_S = 60.0


class WorkerFailed(Exception):
    """A worker died over a call, or could not be started."""


@dataclass
class _Call:
    target: str
    arguments: dict[str, Any]
    timeout_s: float
    future: Future[Any] = field(default_factory=Future)


class _Worker:
    """One process and the pipes to it."""

    def __init__(self, max_memory_bytes: int) -> None:
        self.child = ChildProcess(
            python_module("mettle.envs.rubrics.worker", str(max_memory_bytes)),
            tie="pipe",
            has_pipes=True,
            environment={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        )
        self.loaded: set[str] = set()

    def ask(self, request: tuple[Any, ...], timeout_s: float) -> tuple[str, Any]:
        """The worker's answer: a word and a value.

        Raises: Overrun after `timeout_s`; WorkerFailed when the worker is gone.
        """
        frame = pack(pickle.dumps(request))
        deadline = time.monotonic() + timeout_s
        try:
            self._write(frame, deadline)
            size = sum(lengths_of(self._read(HEADER.size, deadline)))
            answer: tuple[str, Any] = pickle.loads(self._read(size, deadline))
        except OSError as error:
            code = self.child.wait(1.0)
            how = "closed its pipes" if code is None else how_it_ended(code)
            raise WorkerFailed(f"the worker {how}") from error
        return answer

    def _write(self, frame: bytes, deadline: float) -> None:
        descriptor, view = self.child.stdin.fileno(), memoryview(frame)
        os.set_blocking(descriptor, False)
        while view:
            _wait(descriptor, deadline, is_write=True)
            view = view[os.write(descriptor, view[:65536]) :]

    def _read(self, size: int, deadline: float) -> bytes:
        descriptor, parts = self.child.stdout.fileno(), bytearray()
        while len(parts) < size:
            _wait(descriptor, deadline, is_write=False)
            part = os.read(descriptor, min(size - len(parts), 1 << 20))
            if not part:
                raise BrokenPipeError("end of the worker's answers")
            parts += part
        return bytes(parts)


def _wait(descriptor: int, deadline: float, *, is_write: bool) -> None:
    """Wait until the pipe can be used; poll, because select knows no descriptor over 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT if is_write else select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise Overrun


class ScoringProcesses:
    """Up to `max_workers` worker processes, started when calls wait, ended after `idle_s` without any."""

    def __init__(self, max_workers: int, *, idle_s: float = IDLE_S, max_memory_bytes: int = 0) -> None:
        self.max_workers = max_workers
        self.max_memory_bytes = max_memory_bytes
        self.num_killed = 0
        self._idle_s = idle_s
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_pending = 0
        self._workers: set[_Worker] = set()
        self._is_closed = False
        _pools.add(self)

    @property
    def pids(self) -> list[int]:
        """The worker processes that there are."""
        with self._lock:
            return [worker.child.pid for worker in self._workers]

    async def call(self, target: str, arguments: dict[str, Any], *, timeout_s: float | None = None) -> Any:
        """`module:function` with these arguments, in a worker.

        Raises: Overrun when it takes longer; WorkerFailed when the worker dies; what the function raised.
        """
        return await asyncio.wrap_future(self.submit(target, arguments, timeout_s=timeout_s))

    def submit(self, target: str, arguments: dict[str, Any], *, timeout_s: float | None = None) -> Future[Any]:
        """`call`, for code without an event loop."""
        call = _Call(target, arguments, DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
        with self._lock:
            if self._is_closed:
                raise WorkerFailed("the worker processes were closed")
            self._calls.put(call)
            self._num_pending += 1
            if self._num_threads < min(self.max_workers, self._num_pending):
                self._num_threads += 1
                threading.Thread(target=self._serve, name="scoring", daemon=True).start()
        return call.future

    def close(self) -> None:
        """End every worker; calls under way fail."""
        with self._lock:
            self._is_closed = True
            workers, self._workers = set(self._workers), set()
        for worker in workers:  # its own thread, which reads from it, learns that it has ended and lets go of the pipes
            worker.child.signal(signal.SIGKILL)
            worker.child.wait()

    def abandon(self) -> None:
        """In a forked child: the workers are the parent's."""
        for worker in self._workers:
            worker.child.forget()

    def _serve(self) -> None:
        """One thread per worker: it starts it, feeds it, and replaces it."""
        worker: _Worker | None = None
        while True:
            try:
                call = self._calls.get(timeout=self._idle_s)
            except queue.Empty:
                with self._lock:
                    if self._num_pending and not self._is_closed:
                        continue
                    self._num_threads -= 1
                self._drop(worker)
                return
            is_wanted = call.future.set_running_or_notify_cancel()
            if is_wanted:
                value, error, worker = self._answer(call, worker)
            with self._lock:  # before whoever asked can ask again: they would be given a worker more
                self._num_pending -= 1
            if is_wanted and error is not None:
                call.future.set_exception(error)
            elif is_wanted:
                call.future.set_result(value)

    def _answer(self, call: _Call, worker: _Worker | None) -> tuple[Any, BaseException | None, _Worker | None]:
        """What a call gives or raises, and the worker, or None when it did not survive."""
        try:
            worker = worker or self._new_worker()
            word, value = _converse(worker, call)
        except (Overrun, WorkerFailed) as error:
            self.num_killed += isinstance(error, Overrun)
            self._drop(worker)
            return None, error, None
        except Exception as error:
            return None, WorkerFailed(f"its arguments cannot go to another process: {error}"), worker
        if word == "returned":
            return value, None, worker
        return None, value if word == "raised" else Overrun(), worker

    def _new_worker(self) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise WorkerFailed("the worker processes were closed")
            try:
                worker = _Worker(self.max_memory_bytes)
            except OSError as error:
                raise WorkerFailed(f"no worker process could be started: {error}") from error
            self._workers.add(worker)
        return worker

    def _drop(self, worker: _Worker | None) -> None:
        if worker is None:
            return
        worker.child.kill()
        with self._lock:
            self._workers.discard(worker)


def _converse(worker: _Worker, call: _Call) -> tuple[str, Any]:
    if call.target not in worker.loaded:
        word, value = worker.ask(("load", call.target, list(sys.path)), LOAD_TIMEOUT_S)
        if word != "loaded":
            return word, value
        worker.loaded.add(call.target)
    return worker.ask(("call", call.target, call.arguments, call.timeout_s), wall_limit_s(call.timeout_s))


def wall_limit_s(timeout_s: float) -> float:
    """The wall time after which a worker is killed over a call that may take `timeout_s` of CPU time."""
    return 3.0 * timeout_s + 1.0


_pools: weakref.WeakSet[ScoringProcesses] = weakref.WeakSet()
_shared: dict[str, ScoringProcesses] = {}
_shared_lock = threading.Lock()


def shared_processes(purpose: str, max_workers: int, *, max_memory_bytes: int = 0) -> ScoringProcesses:
    """The pool for `purpose`, as large as the largest that was asked for, within the machine's cores."""
    with _shared_lock:
        limit = max(1, min(max_workers, num_cores()))
        pool = _shared.get(purpose)
        if pool is None:
            pool = _shared[purpose] = ScoringProcesses(limit, max_memory_bytes=max_memory_bytes)
        pool.max_workers = max(pool.max_workers, limit)
        return pool


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


def _forget_all() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    _shared.clear()
    pools = list(_pools)
    _pools.clear()
    for pool in pools:
        pool.abandon()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
