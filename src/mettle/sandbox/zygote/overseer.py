"""The workers of a machine, as its process 1 oversees them: started, hunted down when they must end, and collected.

`Overseer` knows nothing of how orders come and answers go: `Machine` has a socket along which descriptors travel, the
agent of a container a stream of frames.
Invariant: the answer to a killed order is sent when no process of its tree is left.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any, Final

from mettle.sandbox.zygote import jail, kernel_memory, operations, watch
from mettle.sandbox.zygote.settings import MachineLimits, Settings

_URGENT_LOOK_S: Final = 0.004  # while memory grows fast or is nearly used up
_BUSY_LOOK_S: Final = 0.02
_IDLE_LOOK_S: Final = 0.25
_HUNT_S: Final = 0.002
_MAX_HUNT_S: Final = 1.0


@dataclass
class OperationWorker:
    """One order that is being carried out."""

    order: int
    pid: int
    has_run_out_of_memory: bool = False
    hunted_since: float | None = None


@dataclass
class Overseer:
    """The part of process 1 that has to do with processes. `root` is where /work is when there is no jail."""

    settings: Settings
    limits: MachineLimits
    root: str
    sockets: kernel_memory.Sockets | None = None  # of its own network
    workers: dict[int, OperationWorker] = field(default_factory=dict)
    next_look: float = 0.0
    last_total: int = 0

    def answer(self, order: int, answer: dict[str, Any]) -> None:
        """Say how an order has ended."""
        raise NotImplementedError

    def wake_on_ended_children(self) -> int:
        """A descriptor that becomes readable when a process has ended."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return reader

    def wait_ms(self) -> float | None:
        """How long there is nothing to do by the clock; None if for ever."""
        if any(worker.hunted_since is not None for worker in self.workers.values()):
            return _HUNT_S * 1000
        if self.next_look == 0.0:
            return None
        return max(0.0, self.next_look - time.monotonic()) * 1000 + 1

    def start(self, header: dict[str, Any], descriptors: list[int]) -> None:
        """Fork the worker of an order."""
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            operations.live(header, descriptors, self.settings, self.limits, self.root)
        self.workers[pid] = OperationWorker(header["id"], pid)
        self.look_soon()

    def look_soon(self) -> None:
        """Memory may be used from now on."""
        self.next_look = time.monotonic() + _BUSY_LOOK_S

    def kill(self, header: dict[str, Any]) -> None:
        """Begin to end a tree. Its worker is stopped first: while it is there, no descendant finds another parent."""
        for worker in self.workers.values():
            if worker.order == header["target"] and worker.hunted_since is None:
                jail.kill(worker.pid, signal.SIGSTOP)
                worker.hunted_since = time.monotonic()
        self.answer(header["id"], {})

    def hunt(self) -> None:
        """One pass over the trees that must end. What forks faster than it is found falls with all the rest."""
        for worker in [worker for worker in self.workers.values() if worker.hunted_since is not None]:
            prey = watch.live_descendants(worker.pid)
            if not prey:
                jail.kill(worker.pid)
                continue
            if time.monotonic() - (worker.hunted_since or 0.0) > _MAX_HUNT_S and os.getpid() == 1:
                jail.kill(-1)
            for pid in prey:
                jail.kill(pid)

    def collect(self) -> None:
        """Take in every process that has ended, also those that lost their parent, and report the workers."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                return
            worker = self.workers.pop(pid, None)
            if worker is not None:
                code = os.waitstatus_to_exitcode(status)
                code = 128 - code if code < 0 else code
                self.answer(worker.order, {"status": code, "is_out_of_memory": worker.has_run_out_of_memory})

    def watch_memory(self) -> None:
        """End the largest processes while all together hold more than their share."""
        if self.next_look == 0.0 or time.monotonic() < self.next_look:
            return
        pids = self._processes()
        tables = kernel_memory.table_bytes(pids)
        sizes = {pid: watch.process_resident_bytes(pid) + tables[pid] for pid in pids}
        limit = self.limits.memory_bytes
        in_buffers = self._buffer_bytes(pids) if pids else 0
        total = sum(sizes.values()) + in_buffers
        is_urgent = 4 * total > 3 * limit or total - self.last_total > limit // 16
        self.last_total = total
        if total > limit:
            if sum(tables.values()) + in_buffers <= limit:  # or else no exact size changes that it is too much
                sizes = {pid: size + tables[pid] for pid, size in watch.proportional_bytes(pids).items()}
                total = sum(sizes.values()) + in_buffers
            self._relieve(sizes, in_buffers, total - limit)
        pause = _URGENT_LOOK_S if is_urgent else _BUSY_LOOK_S if self.workers else _IDLE_LOOK_S
        self.next_look = time.monotonic() + pause if pids or self.workers else 0.0

    def _processes(self) -> list[int]:
        """Every process of the machine except process 1 and its workers."""
        known = watch.cell_processes() if self.settings.is_jailed else watch.descendants(os.getpid())
        return [pid for pid in known if pid not in self.workers]

    def _buffer_bytes(self, pids: list[int]) -> int:
        """What sockets and pipes hold: what they belong to may be in any process, or between two."""
        if self.sockets is None:
            return kernel_memory.stream_bytes(pids)
        return self.sockets.num_bytes() + kernel_memory.pipe_bytes(pids)

    def _relieve(self, sizes: dict[int, int], in_buffers: int, excess_bytes: int) -> None:
        """End the largest. Nobody knows whose the buffers are: each process has a part of them by its descriptors."""
        parts = kernel_memory.parts(in_buffers, list(sizes))
        sizes = {pid: num_bytes + parts[pid] for pid, num_bytes in sizes.items()}
        for pid, num_bytes in sorted(sizes.items(), key=lambda entry: -entry[1]):
            if excess_bytes <= 0:
                return
            for above in watch.ancestors(pid):
                if above in self.workers:
                    self.workers[above].has_run_out_of_memory = True
            jail.kill(pid)
            excess_bytes -= num_bytes
