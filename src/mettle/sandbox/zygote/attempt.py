"""One test while it runs: its input fed, its output taken, its limits watched.

Process 1 holds the other ends of the child's streams. Nothing that the child does with its own ends (close them, never
read, write without end, hand them to a grandchild) delays or ends the loop; only its exit or a limit does.
Invariant: no more than the allowed output is kept, plus one read.
"""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any, Final, NamedTuple

from mettle.sandbox.zygote import jail, watch
from mettle.sandbox.zygote.counter import Counter
from mettle.sandbox.zygote.settings import Settings
from mettle.sandbox.zygote.watch import Usage

_POLL_S: Final = 0.02
_READ_BYTES: Final = 1 << 16
_READABLE: Final = select.POLLIN | select.POLLHUP | select.POLLERR


class Child(NamedTuple):
    """A child that has shut its doors and waits for a job, and this process's ends of its streams."""

    pid: int
    exit_fd: int
    job: socket.socket
    stdin: int
    stdout: int
    stderr: int
    result: int
    spent_s: float  # of processor, before its job
    resident_bytes: int
    counter: Counter | None = None  # of calls that it must ask for

    @property
    def streams(self) -> tuple[int, int, int, int]:
        return (self.stdin, self.stdout, self.stderr, self.result)

    def close(self) -> None:
        self.job.close()
        if self.counter is not None:
            os.close(self.counter.listener)
        for descriptor in (self.exit_fd, *self.streams):
            os.close(descriptor)


class Attempt:
    """The clocks start when it is made. `ended` is why it is over: "exit", or the limit that it passed."""

    def __init__(
        self, child: Child, header: dict[str, Any], stdin: bytes, settings: Settings, scratch: str = ""
    ) -> None:
        self.child = child
        self._stdin = memoryview(stdin)
        self._is_jailed = settings.is_jailed
        self._scratch = scratch if child.counter else ""
        self._disk_bytes = settings.max_file_bytes
        self._is_program = header["mode"] == "program"
        self._wall_s: float = header["wall_s"]
        self._cpu_s: float = header["cpu_s"]
        self._memory_bytes: int = header["memory_bytes"]
        self._output_bytes: int = header["output_bytes"]
        self._written = {descriptor: bytearray() for descriptor in child.streams[1:]}
        # A program shares nothing with the template once it has taken the child's place.
        self._inherited_bytes = 0 if self._is_program else child.resident_bytes
        self.ended = ""
        self.started = time.monotonic()

    @property
    def is_flooded(self) -> bool:
        return sum(len(data) for data in self._written.values()) > self._output_bytes

    def pieces(self) -> list[bytes]:
        """What was written to each stream, as far as it is allowed."""
        return [bytes(data)[: self._output_bytes] for data in self._written.values()]

    def watch(self, channel: socket.socket) -> None:
        """Feed and read the child until it ends or passes a limit; ConnectionError when the owner hangs up."""
        poller = select.poll()
        for descriptor in (self.child.exit_fd, *self._written):
            poller.register(descriptor, _READABLE)
        poller.register(channel, select.POLLRDHUP)
        poller.register(self.child.stdin, select.POLLOUT)
        if self.child.counter is not None:
            poller.register(self.child.counter.listener, select.POLLIN)
        self._write_stdin(poller)
        next_look = self.started + _POLL_S
        while not self.ended:
            for descriptor, _ in poller.poll(max(0.0, next_look - time.monotonic()) * 1000 + 1):
                if descriptor == channel.fileno():
                    raise ConnectionResetError("the owner hung up")
                self._attend(poller, descriptor)
            if not self.ended and time.monotonic() >= next_look:
                self._check_limits()
                next_look = time.monotonic() + _POLL_S

    def drain(self) -> None:
        """Everything is dead: read what is left in the pipes, up to the limit."""
        for descriptor, data in self._written.items():
            while len(data) <= self._output_bytes:
                try:
                    piece = os.read(descriptor, _READ_BYTES)
                except BlockingIOError:
                    break
                if not piece:
                    break
                data += piece

    def _attend(self, poller: select.poll, descriptor: int) -> None:
        if descriptor == self.child.exit_fd:
            self.ended = self.ended or "exit"
        elif descriptor == self.child.stdin:
            self._write_stdin(poller)
        elif self.child.counter is not None and descriptor == self.child.counter.listener:
            if not self.child.counter.attend():
                poller.unregister(descriptor)
        elif not self._read(descriptor):
            poller.unregister(descriptor)

    def _write_stdin(self, poller: select.poll) -> None:
        """Write what the pipe takes; close it at the end of the input or when nobody reads."""
        try:
            while self._stdin:
                self._stdin = self._stdin[os.write(self.child.stdin, self._stdin[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = self._stdin[:0]
        poller.unregister(self.child.stdin)
        # Replaced rather than closed: the number stays taken until the test is over.
        os.dup2(jail.NOTHING_FD, self.child.stdin, inheritable=False)

    def _read(self, descriptor: int) -> bool:
        """Take what is there; False at the end of the stream. Too much output ends the test."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        self._written[descriptor] += data
        if self.is_flooded:
            self.ended = "output"
        return bool(data)

    def _check_limits(self) -> None:
        usage = self._usage()
        if usage.cpu_s - self.child.spent_s > self._cpu_s:
            self.ended = "cpu"
        elif usage.resident_bytes > self._memory_bytes and self._is_over_memory():
            self.ended = "memory"
        elif time.monotonic() - self.started > self._wall_s:
            self.ended = "wall"
        elif self._scratch and watch.tree_bytes(self._scratch, self.child.pid) > self._disk_bytes:
            self.ended = "disk"

    def _usage(self) -> Usage:
        if self.child.counter is None:
            return watch.measure(self.child.pid, self._inherited_bytes, is_jailed=self._is_jailed)
        return watch.measure_one(self.child.pid)

    def _is_over_memory(self) -> bool:
        """The exact sum, for programs: their processes share pages, which the quick sum counts each time."""
        if not self._is_program:
            return True
        pids = watch.cell_processes() if self._is_jailed else watch.descendants(os.getpid())
        return sum(watch.proportional_bytes(pid) for pid in pids) + watch.hidden_bytes(pids) > self._memory_bytes
