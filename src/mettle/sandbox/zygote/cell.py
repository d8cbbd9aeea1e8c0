"""Process 1 of a cell: takes one solution and its tests from the owner, and starts, watches and reaps a child for each.

Inside the cell nobody can signal, trace or read process 1, and when it ends the kernel ends everything else in the
cell. Messages: `load` (the source, or files), `run` (one test: limits, input) answered by `done`; the end of the
connection ends the cell. The next child is forked while the owner looks at the last answer. Process 1 itself holds no
capability and is behind the filter before the first untrusted byte arrives.
Invariant: when `done` is sent, no process of that test is alive; a cell whose files a test has touched says that it is
worn and ends, so that no test finds what another has written; and no test's process is forked from a frame, or with
memory or descriptors, that hold anything of another test (`unshared.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

from mettle.sandbox.zygote import child, frames, jail, kernel, landlock_only, processor, rootfs, watch
from mettle.sandbox.zygote.attempt import Child, RunAttempt
from mettle.sandbox.zygote.counter import Counter, take_over
from mettle.sandbox.zygote.meter import Meter, open_meter
from mettle.sandbox.zygote.program import ProgramDirectory
from mettle.sandbox.zygote.settings import Settings
from mettle.sandbox.zygote.unshared import UnsharedBuffer, send

_MAX_HELLO_BYTES: Final = 1 << 16
_WORK: Final = "/work"


def live(
    channel: socket.socket, settings: Settings, program: bytes | None, entrances: Sequence[int], *, has_files: bool
) -> NoReturn:
    """The cell's whole life, in the freshly cloned process. Nothing that goes wrong returns to the template's code.

    `program` is the filter; a cell that `has_files` can be given files to run besides Python source. `entrances` are
    those of its cgroup, if it has one (`meter.py`).
    """
    try:
        channel, entrances = jail.keep_only(channel, entrances)
        meter = open_meter(may_use_event=settings.may_use_event, entrances=entrances)
        _live(channel, settings, program, meter, has_files=has_files)
    except ConnectionError:
        pass  # the owner hung up; the cell has nobody to work for
    except BaseException as error:
        print(f"a cell ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        if not settings.is_jailed:
            jail.kill_descendants()
        os._exit(0)  # and the kernel ends whatever is left in the cell


def _live(
    channel: socket.socket, settings: Settings, program: bytes | None, meter: Meter | None, *, has_files: bool
) -> None:
    try:
        _enter(settings)
        files = _make_directory(settings) if has_files else None
        _confine(settings, program)
        cell = CellProcess(channel, settings, program if settings.is_landlocked else None, files, meter)
        cell.prepare_child()
    except OSError as error:
        channel.sendall(frames.encode({"failed": str(error)}))
        return
    channel.sendall(frames.encode({"ready": True, "cpu_meter": meter.kind if meter else ""}))
    try:
        cell.serve()
    finally:
        cell.remove_scratch()
        if files is not None:
            files.remove()


def _enter(settings: Settings) -> None:
    """Take possession of the new namespaces."""
    if not settings.is_jailed:
        # It ends when the owner hangs up, and not sooner: no kernel ends the test's processes here, so it must.
        kernel.adopt_orphans()
        processor.keep_load()
        return
    jail.own_user(settings.outside_id)
    processor.keep_load()
    rootfs.mount_proc("/proc")
    rootfs.mount_private_directories(settings.disk_bytes, settings.max_disk_files)
    os.chdir(_WORK)


def _make_directory(settings: Settings) -> ProgramDirectory:
    if settings.is_jailed:
        return ProgramDirectory.mount()
    return ProgramDirectory.make_open(f"{settings.scratch}/{os.getpid()}.program")


def _confine(settings: Settings, program: bytes | None) -> None:
    """Give up everything that process 1 does not need; its children inherit that."""
    jail.limit(file_bytes=settings.max_file_bytes, open_files=settings.max_open_files)
    if settings.is_jailed:
        jail.confine(program, settings.max_processes + 1)  # process 1 counts
    elif settings.is_landlocked:
        landlock_only.confine_process_1()


class Spent(NamedTuple):
    """What all processes of a test used, and the wait status of the first."""

    status: int
    cpu_s: float
    peak_bytes: int


class CellProcess:
    """The loop of process 1."""

    def __init__(
        self,
        channel: socket.socket,
        settings: Settings,
        program: bytes | None,
        files: ProgramDirectory | None,
        meter: Meter | None = None,
    ) -> None:
        self._meter = meter
        self._channel = channel
        self._settings = settings
        self._program = program
        self._files = files
        self._source = b""
        self._scratch = "" if settings.is_jailed else f"{settings.scratch}/{os.getpid()}"
        self._child: Child | None = None
        # What goes into a test and what comes out of it: of this process alone, whatever it forks.
        self._input = UnsharedBuffer()
        self._outputs = (UnsharedBuffer(), UnsharedBuffer(), UnsharedBuffer())

    def serve(self) -> None:
        """Answer messages until the owner goes away."""
        while self._serve_test():
            # Forked from here, where no frame holds anything of a test.
            self.prepare_child()

    def _serve_test(self) -> bool:
        """Answer the next order to run a test, and those before it; whether there may be another."""
        while (order := frames.receive_order(self._channel, self._input)) is not None:
            if "feed" in order.header:
                continue  # for a test that was over before it came
            if "load" in order.header:
                self._load(order)
                continue
            done, pieces = self._run(order)
            is_last = order.header["is_last"]
            is_worn = not is_last and self.is_worn()
            num_bytes = sum(map(len, pieces))
            send(self._channel, [frames.encode_header({**done, "is_worn": is_worn}, num_bytes), *pieces])
            return not (is_worn or is_last)
        return False

    def is_worn(self) -> bool:
        """Whether the test that is over has left something that the next one could find."""
        return self._settings.is_jailed and not rootfs.are_private_directories_untouched()

    def _load(self, order: frames.Order) -> None:
        """Keep the source, or write the files that the next tests run."""
        if "files" not in order.header:
            self._source = bytes(order.payload)
            return
        assert self._files is not None, "the owner makes cells for programs with a directory for them"
        self._files.write([(name, size) for name, size in order.header["files"]], order.payload)

    def prepare_child(self) -> None:
        """Fork the next child and wait until its doors are shut; OSError if one did not shut."""
        self.renew_scratch()
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
        counted = None
        if self._program is not None:
            counted = Counter(take_over(ours), pid, self._settings.max_processes, landlock_only.MAX_FILES)
        word = ours.recv(_MAX_HELLO_BYTES)
        if word != child.READY:
            raise OSError(5, f"a test's process could not be prepared: {word.decode() or 'it ended'}")
        kept = (pipes[0][1], pipes[1][0], pipes[2][0], pipes[3][0])
        for descriptor in kept:
            os.set_blocking(descriptor, False)
        spent_s, resident_bytes = watch.process_cpu_s(pid), watch.process_resident_bytes(pid)
        self._child = Child(pid, os.pidfd_open(pid), ours, *kept, spent_s, resident_bytes, counted)

    def renew_scratch(self) -> None:
        """An empty directory for the next test, where the jail does not give it one."""
        if self._scratch:
            self.remove_scratch()
            os.mkdir(self._scratch, 0o700)

    def remove_scratch(self) -> None:
        """Delete what a test without a jail left in its directory."""
        if self._scratch and os.path.isdir(self._scratch):
            try:
                os.rmdir(self._scratch)  # most tests leave nothing
            except OSError:
                jail.remove_tree(self._scratch)

    def _run(self, order: frames.Order) -> tuple[dict[str, Any], list[bytes | memoryview]]:
        """Run one test in the waiting child; how it went, and what it has written."""
        header, attempt = order.header, self._start(order)
        try:
            attempt.watch(self._channel)
            spent = self._reap(attempt.child.pid)
            attempt.drain()
        finally:
            attempt.child.close()
            self._child = None
        pieces: list[bytes | memoryview] = [*attempt.pieces()]
        if header.get("artifact"):
            pieces[-1] = _read_artifact(f"{self._scratch or _WORK}/{header['artifact']}", header["max_artifact_bytes"])
        done: dict[str, Any] = {
            "done": header["run"],
            "ended": "output" if attempt.is_flooded else attempt.ended,
            "status": spent.status,
            "wall_s": time.monotonic() - attempt.started,
            "cpu_s": attempt.processor.total(spent.cpu_s),
            "memory_bytes": spent.peak_bytes,
            "lengths": [len(piece) for piece in pieces],
            "has_outlived_input": attempt.has_outlived_input,
        }
        return done, pieces

    def _start(self, order: frames.Order) -> RunAttempt:
        """Hand the job over; the clocks start here."""
        header, waiting = order.header, self._child
        assert waiting is not None, "a child waits between tests"
        is_call, is_program = header["mode"] == "call", header["mode"] == "program"
        stdin = order.payload[:0] if is_call else order.payload
        attempt = RunAttempt(waiting, header, stdin, self._outputs, self._settings, self._scratch, self._meter)
        source = b"" if is_program else self._source
        text = frames.encode_text({**header, "argv": self._fill_in(header["argv"])}) if is_program else order.text
        arguments = order.payload if is_call else order.payload[:0]
        with contextlib.suppress(BrokenPipeError):  # it died while it waited; its exit status tells
            send(waiting.job, [child.JOB.pack(len(text), len(source), len(arguments)), text, source, arguments])
        return attempt

    def _fill_in(self, argv: list[str]) -> list[str]:
        """The command with the places that only this cell knows."""
        assert self._files is not None, "the owner makes cells for programs with a directory for them"
        places = {"{files}": self._files.path, "{work}": self._scratch or _WORK}
        for mark, path in places.items():
            argv = [word.replace(mark, path) for word in argv]
        return argv

    def _reap(self, first_pid: int) -> Spent:
        """Kill everything that the test left, and collect it."""
        if self._settings.is_landlocked:
            jail.kill(first_pid)  # it could start no other
        else:
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
            if not self._settings.is_jailed and not self._settings.is_landlocked:
                self._kill_all()
        return Spent(status, cpu_s, peak_kb * 1024)

    def _kill_all(self) -> None:
        if not self._settings.is_jailed:
            jail.kill_descendants()
        elif os.getpid() == 1:
            jail.kill(-1)


def _read_artifact(path: str, max_bytes: int) -> bytes:
    """A file that a compiler has left; empty if there is none. Nobody is left to change it while it is read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > max_bytes:
            return b""
        return file.read(max_bytes)
