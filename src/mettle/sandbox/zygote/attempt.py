"""One test while it runs: its input fed, its output taken, its limits watched.

Process 1 holds the other ends of the child's streams. Nothing that the child does with its own ends (close them, never
read, write without end, hand them to a grandchild) delays or ends the loop; only its exit or a limit does.
Invariant: no more than the allowed output is kept, plus one read.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from mettle.sandbox.zygote import frames, jail, watch
from mettle.sandbox.zygote.counter import Counter
from mettle.sandbox.zygote.meter import Meter
from mettle.sandbox.zygote.processor import ProcessorTime
from mettle.sandbox.zygote.settings import Settings
from mettle.sandbox.zygote.unshared import UnsharedBuffer

WALL_FACTOR: Final = 10.0  # times the wall limit that a test may take on a host that gives it no processor
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


class RunAttempt:
    """The clocks start when it is made. `ended` is why it is over: "exit", or the limit that it passed."""

    def __init__(
        self,
        child: Child,
        header: dict[str, Any],
        stdin: memoryview,
        outputs: Sequence[UnsharedBuffer],
        settings: Settings,
        scratch: str = "",
        meter: Meter | None = None,
    ) -> None:
        self.child = child
        self._stdin = stdin
        self._is_jailed = settings.is_jailed
        self._scratch = scratch if child.counter else ""
        self._disk_bytes = settings.max_file_bytes
        self._is_program = header["mode"] == "program"
        self._wall_s: float = header["wall_s"]
        self._cpu_s: float = header["cpu_s"]
        self._memory_bytes: int = header["memory_bytes"]
        self._output_bytes: int = header["output_bytes"]
        for buffer in outputs:
            buffer.length = 0
        self._written = dict(zip(child.streams[1:], outputs, strict=True))
        # A program shares nothing with the template once it has taken the child's place.
        self._inherited_bytes = 0 if self._is_program or child.counter else child.resident_bytes
        self._number: int = header["run"]
        # What it reads comes from the owner as it runs, and what it prints goes there.
        self._is_live: bool = header["is_live"]
        self._is_input_open = self._is_live
        self.has_outlived_input = False  # the owner ended its input before it ended
        self._used_s, self._asleep_s = 0.0, 0.0
        self.ended = ""
        self.started = self._looked = time.monotonic()
        self.processor = ProcessorTime(child.spent_s, self.started, meter)

    @property
    def is_flooded(self) -> bool:
        return sum(written.length for written in self._written.values()) > self._output_bytes

    def pieces(self) -> list[memoryview]:
        """What was written to each stream, as far as it is allowed."""
        return [written.view(0, self._output_bytes) for written in self._written.values()]

    def watch(self, channel: socket.socket) -> None:
        """Feed and read the child until it ends or passes a limit; ConnectionError when the owner hangs up."""
        poller = select.poll()
        for descriptor in (self.child.exit_fd, *self._written):
            poller.register(descriptor, _READABLE)
        poller.register(channel, select.POLLRDHUP | (select.POLLIN if self._is_live else 0))
        poller.register(self.child.stdin, select.POLLOUT)
        if self.child.counter is not None:
            poller.register(self.child.counter.listener, select.POLLIN)
        self._write_stdin(poller)
        next_look = self.started + _POLL_S
        while not self.ended:
            for descriptor, _ in poller.poll(max(0.0, next_look - time.monotonic()) * 1000 + 1):
                if descriptor == channel.fileno():
                    self._hear(poller, channel)
                else:
                    self._attend(poller, descriptor, channel)
            if not self.ended and time.monotonic() >= next_look:
                self._check_limits()
                next_look = time.monotonic() + _POLL_S * (0.5 + os.urandom(1)[0] / 255)  # not to be timed by the code

    def drain(self) -> None:
        """Everything is dead: read what is left in the pipes, up to the limit."""
        for descriptor, written in self._written.items():
            while written.length <= self._output_bytes:
                try:
                    if not written.read(descriptor, _READ_BYTES):
                        break
                except BlockingIOError:
                    break

    def _hear(self, poller: select.poll, channel: socket.socket) -> None:
        """More input for a test that is fed as it runs; of any other the owner can only hang up."""
        frame = frames.receive(channel) if self._is_live else None
        if frame is None:
            raise ConnectionResetError("the owner hung up")
        if frame.header["is_end"] and not watch.is_ending(self.child.pid):
            self.has_outlived_input = True
        if not self._is_input_open:
            return
        self._stdin = memoryview(bytes(self._stdin) + frame.payload)  # a cell that is fed serves no other test
        self._is_input_open = not frame.header["is_end"]
        self._asleep_s = 0.0  # it may have waited for this; all in all it is bounded by the last limit
        poller.register(self.child.stdin, select.POLLOUT)
        self._write_stdin(poller)

    def _tell(self, channel: socket.socket, num_bytes: int) -> None:
        """What has just been printed, to the owner; nothing when it is closed."""
        written = self._written[self.child.stdout]
        data = bytes(written.view(written.length - num_bytes))
        channel.sendall(frames.encode({"out": self._number, "is_end": not data}, data))

    def _attend(self, poller: select.poll, descriptor: int, channel: socket.socket) -> None:
        if descriptor == self.child.exit_fd:
            self.ended = self.ended or "exit"
        elif descriptor == self.child.stdin:
            self._write_stdin(poller)
        elif self.child.counter is not None and descriptor == self.child.counter.listener:
            if not self.child.counter.attend():
                poller.unregister(descriptor)
        elif (num_bytes := self._read(descriptor)) is not None:
            if not num_bytes:
                poller.unregister(descriptor)
            if self._is_live and descriptor == self.child.stdout:
                self._tell(channel, num_bytes)

    def _write_stdin(self, poller: select.poll) -> None:
        """Write what the pipe takes; close it at the end of the input or when nobody reads."""
        try:
            while len(self._stdin):
                self._stdin = self._stdin[os.write(self.child.stdin, self._stdin[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = self._stdin[:0]
            self._is_input_open = False
        with contextlib.suppress(KeyError):  # what the owner sent in the same round has been written before
            poller.unregister(self.child.stdin)
        if self._is_input_open:
            return
        # Replaced rather than closed: the number stays taken until the test is over.
        os.dup2(jail.NOTHING_FD, self.child.stdin, inheritable=False)

    def _read(self, descriptor: int) -> int | None:
        """Take what is there, and say how much: 0 at the end of the stream, None if it is not there yet.

        Too much ends the test.
        """
        try:
            num_bytes = self._written[descriptor].read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return None
        if self.is_flooded:
            self.ended = "output"
        return num_bytes

    def _check_limits(self) -> None:
        pids, now = self._pids(), time.monotonic()
        used_s = self.processor.look(pids, now)
        resident_bytes = watch.resident_bytes(pids, self._inherited_bytes)
        if used_s > self._cpu_s:
            self.ended = "cpu"
        elif resident_bytes > self._memory_bytes and self._is_over_memory(pids):
            self.ended = "memory"
        elif self._has_slept_too_long(used_s, pids, now):
            self.ended = "wall"
        elif self._scratch and watch.tree_bytes(self._scratch, self.child.pid) > self._disk_bytes:
            self.ended = "disk"

    def _has_slept_too_long(self, cpu_s: float, pids: list[int], now: float) -> bool:
        """The wall limit counts what the test has used and slept, and not that a busy host let it wait for its turn."""
        lacked_s = now - self._looked - max(0.0, cpu_s - self._used_s)
        if lacked_s > 0 and not watch.is_runnable(pids):
            self._asleep_s += lacked_s
        self._looked, self._used_s = now, max(cpu_s, self._used_s)
        return self._used_s + self._asleep_s > self._wall_s or now - self.started > WALL_FACTOR * self._wall_s

    def _pids(self) -> list[int]:
        if self.child.counter is not None:
            return [self.child.pid]
        # Orphans come to this process.
        return (watch.cell_processes() if self._is_jailed else watch.descendants(os.getpid())) or [self.child.pid]

    def _is_over_memory(self, pids: list[int]) -> bool:
        """The exact sum, for programs: their processes share pages, which the quick sum counts each time."""
        if not self._is_program:
            return True
        return sum(watch.proportional_bytes(pids).values()) + watch.hidden_bytes(pids) > self._memory_bytes
