"""Process 1 of a cell: takes one solution and its tests from the owner, and starts, watches and reaps a child for each.

Inside the cell nobody can signal, trace or read process 1, and when it ends the kernel ends everything else in the
cell. Messages: `load` (the source), `run` (one test: limits, input) answered by `done`; the end of the connection ends
the cell. The next child is forked while the owner looks at the last answer. Process 1 itself holds no capability and
is behind the filter before the first untrusted byte arrives.
Invariant: when `done` is sent, no process of that test is alive; a cell whose files a test has touched says that it is
worn and ends, so that no test finds what another has written.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from typing import Any, Final, NamedTuple, NoReturn

from mettle.sandbox.zygote import child, frames, jail, kernel, rootfs, seccomp, watch
from mettle.sandbox.zygote.settings import Settings

_POLL_S: Final = 0.02
_READ_BYTES: Final = 1 << 16
_READABLE: Final = select.POLLIN | select.POLLHUP | select.POLLERR


def live(channel: socket.socket, settings: Settings, program: bytes | None) -> NoReturn:
    """The cell's whole life, in the freshly cloned process. Nothing that goes wrong returns to the template's code."""
    try:
        _live(jail.keep_only(channel), settings, program)
    except ConnectionError:
        pass  # the owner hung up; the cell has nobody to work for
    except BaseException as error:
        print(f"a cell ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        if not settings.is_jailed:
            jail.kill_descendants()
        os._exit(0)  # and the kernel ends whatever is left in the cell


def _live(channel: socket.socket, settings: Settings, program: bytes | None) -> None:
    try:
        has_proc = _enter(settings)
        extra_program = None
        if program is not None and not has_proc:
            # Nothing can be seen through /proc, so one process with hard limits is all that a test gets; its filter
            # is its own, because process 1 must fork.
            program, extra_program = None, seccomp.build_filter(allow_fork=False)
        _confine(settings, program)
        cell = Cell(channel, settings, extra_program)
        cell.prepare_child()
    except OSError as error:
        channel.sendall(frames.encode({"failed": str(error)}))
        return
    channel.sendall(frames.encode({"ready": True, "proc": has_proc}))
    try:
        cell.serve()
    finally:
        cell.remove_scratch()


def _enter(settings: Settings) -> bool:
    """Take possession of the new namespaces; returns whether this cell could mount a /proc of its own."""
    jail.forget_signals()
    if not settings.is_jailed:
        # It ends when the owner hangs up, and not sooner: no kernel ends the test's processes here, so it must.
        kernel.adopt_orphans()
        return True
    jail.own_user()
    has_proc = rootfs.mount_proc("/proc")
    rootfs.mount_private_directories(settings.disk_bytes, settings.max_disk_files)
    os.chdir("/work")
    return has_proc


def _confine(settings: Settings, program: bytes | None) -> None:
    """Give up everything that process 1 does not need; its children inherit that."""
    jail.limit(file_bytes=settings.max_file_bytes, open_files=settings.max_open_files)
    if settings.is_jailed:
        jail.confine(program, settings.max_processes + 1)  # process 1 counts


class Child(NamedTuple):
    """A child that has shut its doors and waits for a job, and this process's ends of its streams."""

    pid: int
    exit_fd: int
    job: socket.socket
    stdin: int
    stdout: int
    stderr: int
    result: int


class Spent(NamedTuple):
    """What all processes of a test used, and the wait status of the first."""

    status: int
    cpu_s: float
    peak_bytes: int


class Attempt:
    """One test while it runs. The clocks start when it is made."""

    def __init__(self, child: Child, header: dict[str, Any], stdin: bytes) -> None:
        self.child = child
        self.stdin = memoryview(stdin)
        self.wall_s: float = header["wall_s"]
        self.cpu_s: float = header["cpu_s"]
        self.memory_bytes: int = header["memory_bytes"]
        self.output_bytes: int = header["output_bytes"]
        self.spent_before_s = watch.process_cpu_s(child.pid)
        self.inherited_bytes = watch.process_resident_bytes(child.pid)
        self.written = {descriptor: bytearray() for descriptor in child[4:]}
        self.ended = ""
        self.started = time.monotonic()

    def num_written(self) -> int:
        return sum(len(data) for data in self.written.values())


class Cell:
    """The loop of process 1."""

    def __init__(self, channel: socket.socket, settings: Settings, program: bytes | None) -> None:
        self._channel = channel
        self._settings = settings
        self._program = program
        self._source = b""
        self._scratch = "" if settings.is_jailed else f"{settings.scratch}/{os.getpid()}"
        self._child: Child | None = None

    def serve(self) -> None:
        """Answer messages until the owner goes away."""
        while (frame := frames.receive(self._channel)) is not None:
            if "load" in frame.header:
                self._source = frame.payload
                continue
            done, payload = self._run(frame)
            is_worn = self._settings.is_jailed and not rootfs.are_private_directories_untouched()
            self._channel.sendall(frames.encode({**done, "is_worn": is_worn}, payload))
            if is_worn or frame.header["is_last"]:
                return
            self.prepare_child()

    def prepare_child(self) -> None:
        """Fork the next child and wait until its doors are shut; OSError if one did not shut."""
        self._renew_scratch()
        ours, theirs = socket.socketpair()
        pipes = [os.pipe() for _ in range(4)]
        streams = (pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][1])
        pid = os.fork()
        if pid == 0:
            ours.close()
            child.live(theirs, streams, self._program, self._scratch)
        theirs.close()
        for descriptor in streams:
            os.close(descriptor)
        frame = frames.receive(ours, 1 << 16)
        if frame is None or "failed" in frame.header:
            reason = "it ended" if frame is None else str(frame.header["failed"])
            raise OSError(5, f"a test's process could not be prepared: {reason}")
        made = Child(pid, os.pidfd_open(pid), ours, pipes[0][1], pipes[1][0], pipes[2][0], pipes[3][0])
        for descriptor in made[3:]:
            os.set_blocking(descriptor, False)
        self._child = made

    def _renew_scratch(self) -> None:
        """An empty directory for the next test, where the jail does not give it one."""
        if self._scratch:
            self.remove_scratch()
            os.mkdir(self._scratch, 0o700)

    def remove_scratch(self) -> None:
        """Delete what a test without a jail left in its directory."""
        if self._scratch and os.path.isdir(self._scratch):
            jail.remove_tree(self._scratch)

    def _run(self, frame: frames.Frame) -> frames.Frame:
        """Run one test in the waiting child, and describe how it went."""
        assert self._child is not None, "a child waits between tests"
        header, attempt = frame.header, self._start(frame)
        try:
            self._watch(attempt)
            spent = self._reap(attempt.child.pid)
            self._drain(attempt)
        finally:
            self._close(attempt.child)
            self._child = None
        if attempt.num_written() > attempt.output_bytes:
            attempt.ended = "output"
        pieces = [bytes(attempt.written[fd])[: attempt.output_bytes] for fd in attempt.child[4:]]
        done: dict[str, Any] = {
            "done": header["run"],
            "ended": attempt.ended,
            "status": spent.status,
            "wall_s": time.monotonic() - attempt.started,
            "cpu_s": max(0.0, spent.cpu_s - attempt.spent_before_s),
            "memory_bytes": spent.peak_bytes,
            "lengths": [len(piece) for piece in pieces],
        }
        return frames.Frame(done, b"".join(pieces))

    def _start(self, frame: frames.Frame) -> Attempt:
        """Hand the job over; the clocks start here."""
        header, waiting = frame.header, self._child
        assert waiting is not None, "a child waits between tests"
        is_call = header["mode"] == "call"
        attempt = Attempt(waiting, header, b"" if is_call else frame.payload)
        job = {key: header[key] for key in ("mode", "function", "cpu_s", "memory_bytes")}
        job["code_bytes"] = len(self._source)
        with contextlib.suppress(BrokenPipeError):  # it died while it waited; its exit status tells
            waiting.job.sendall(frames.encode(job, self._source + (frame.payload if is_call else b"")))
        return attempt

    def _watch(self, attempt: Attempt) -> None:
        """Feed and read the child until it ends or passes a limit."""
        poller = select.poll()
        for descriptor in (attempt.child.exit_fd, *attempt.written):
            poller.register(descriptor, _READABLE)
        poller.register(self._channel, select.POLLRDHUP)
        self._feed(attempt, poller)
        next_look = attempt.started + _POLL_S
        while not attempt.ended:
            for descriptor, _ in poller.poll(max(0.0, next_look - time.monotonic()) * 1000 + 1):
                self._attend(attempt, poller, descriptor)
            if not attempt.ended and time.monotonic() >= next_look:
                self._check_limits(attempt)
                next_look = time.monotonic() + _POLL_S

    def _attend(self, attempt: Attempt, poller: select.poll, descriptor: int) -> None:
        if descriptor == attempt.child.exit_fd:
            attempt.ended = attempt.ended or "exit"
        elif descriptor == attempt.child.stdin:
            self._write_stdin(attempt, poller)
        elif descriptor == self._channel.fileno():
            raise ConnectionResetError("the owner hung up")
        elif not self._read(attempt, descriptor):
            poller.unregister(descriptor)

    def _feed(self, attempt: Attempt, poller: select.poll) -> None:
        poller.register(attempt.child.stdin, select.POLLOUT)
        self._write_stdin(attempt, poller)

    def _write_stdin(self, attempt: Attempt, poller: select.poll) -> None:
        """Write what the pipe takes; close it at the end of the input or when nobody reads."""
        try:
            while attempt.stdin:
                attempt.stdin = attempt.stdin[os.write(attempt.child.stdin, attempt.stdin[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            attempt.stdin = attempt.stdin[:0]
        poller.unregister(attempt.child.stdin)
        # Replaced rather than closed: the number stays taken until the test is over.
        os.dup2(jail.NOTHING_FD, attempt.child.stdin, inheritable=False)

    def _read(self, attempt: Attempt, descriptor: int) -> bool:
        """Take what is there; False at the end of the stream. Too much output ends the test."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        attempt.written[descriptor] += data
        if attempt.num_written() > attempt.output_bytes:
            attempt.ended = "output"
        return bool(data)

    def _drain(self, attempt: Attempt) -> None:
        """Everything is dead: read what is left in the pipes, up to the limit."""
        for descriptor, data in attempt.written.items():
            while len(data) <= attempt.output_bytes:
                try:
                    piece = os.read(descriptor, _READ_BYTES)
                except BlockingIOError:
                    break
                if not piece:
                    break
                data += piece

    def _check_limits(self, attempt: Attempt) -> None:
        usage = watch.measure(attempt.child.pid, attempt.inherited_bytes, is_jailed=self._settings.is_jailed)
        if usage.cpu_s - attempt.spent_before_s > attempt.cpu_s:
            attempt.ended = "cpu"
        elif usage.resident_bytes > attempt.memory_bytes:
            attempt.ended = "memory"
        elif time.monotonic() - attempt.started > attempt.wall_s:
            attempt.ended = "wall"

    def _reap(self, first_pid: int) -> Spent:
        """Kill everything that the test left, and collect it."""
        self._kill_all()
        status, peak_kb, cpu_s = 0, 0, 0.0
        while True:
            try:
                pid, ended, usage = os.wait4(-1, 0)
            except ChildProcessError:
                break
            peak_kb = max(peak_kb, usage.ru_maxrss)
            cpu_s += usage.ru_utime + usage.ru_stime
            if pid == first_pid:
                status = ended
            if not self._settings.is_jailed:
                self._kill_all()
        return Spent(status, cpu_s, peak_kb * 1024)

    def _kill_all(self) -> None:
        if not self._settings.is_jailed:
            jail.kill_descendants()
        elif os.getpid() == 1:
            jail.kill(-1)

    @staticmethod
    def _close(ended: Child) -> None:
        ended.job.close()
        for descriptor in (ended.exit_fd, *ended[3:]):
            os.close(descriptor)
