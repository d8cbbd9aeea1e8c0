"""A process that has imported what others begin with, and forks them: a trainer or an engine starts in milliseconds.

Importing torch and transformers takes a process three to seven seconds of a processor. Here one process does it, and
hands it on; what was imported is in memory once.

Parts: `ForkServer` (for who starts processes), `AdoptedProcess` (a child that it made), `main` (the server itself:
`python -m mettle.processes.fork_server FD PARENT MODULE...`), `split` (a server that is a fork of the process itself).
Invariants: a child belongs to who asked for it, which waits for it, and not to the server; it has streams, session,
environment and command line of its own, as after an exec. A server forks only while it has one thread and can't have
touched an accelerator; otherwise it ends, and everyone gets a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mettle.processes.orphans import tie_to_thread
from mettle.processes.readiness import is_readable

IS_POSSIBLE = sys.platform == "linux" and hasattr(os, "pidfd_open")
READY = b"ready"
_ANSWER_S = 10.0
_DRIVERS = ("cuda", "hip", "xpu")
"""What a build of torch may have been made for: names of its libraries, and of its versions."""
_PR_SET_CHILD_SUBREAPER = 36
_ARG_START, _ARG_END = 45, 46
"""Where /proc/PID/stat has the addresses of the command line, counted from the state."""


class AdoptedProcess:
    """A child of this process that another one made: as much of `subprocess.Popen` as is needed of it."""

    stdin = stdout = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it, so nobody knows; as `Popen` has it
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._end)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            is_readable(self._end, left)
        return code


class ForkServer:
    """The other end of a fork server's socket, of which `theirs` is what the fork server is given."""

    def __init__(self) -> None:
        self._line, self.theirs = socket.socketpair()
        self._state = "importing"
        self.twin: AdoptedProcess | None = None
        """The server's process, where it is a fork of this one."""

    @property
    def is_importing(self) -> bool:
        """Whether it is not yet known if it can fork."""
        if self._state == "importing" and is_readable(self._line):
            self._state = "ready" if self._heard(len(READY)) == READY else "gone"
        return self._state == "importing"

    @property
    def is_ready(self) -> bool:
        """Whether it can fork."""
        return not self.is_importing and self._state == "ready"

    def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], output: int
    ) -> AdoptedProcess:
        """A child of this process that runs `module` and prints to the descriptor `output`.

        `environment` is all of it. Raises: OSError when the fork server does not answer; then it is of no more use.
        """
        told = json.dumps([module, list(arguments), dict(environment)]).encode()
        try:
            self._line.settimeout(_ANSWER_S)
            with _adopting():
                socket.send_fds(self._line, [len(told).to_bytes(8, "big")], [output])
                self._line.sendall(told)
                answer = self._heard(8)
            if len(answer) < 8:
                raise OSError("the fork server has ended")
            return AdoptedProcess(int.from_bytes(answer, "big"))
        except OSError:
            self._state = "gone"
            raise

    def close(self) -> None:
        """Nothing more is asked of it, so it ends."""
        self._state = "gone"
        self._line.close()
        self.theirs.close()
        if self.twin is not None:
            self.twin.wait()

    def _heard(self, size: int) -> bytes:
        with contextlib.suppress(ConnectionError):
            return _received(self._line, size)
        return b""


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Within the block, children of this process's children that lose their parent become its own."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _received(line: socket.socket, size: int) -> bytes:
    """Fewer bytes than `size` when the other side is gone."""
    found = b""
    while len(found) < size and (piece := line.recv(size - len(found))):
        found += piece
    return found


def main(arguments: Sequence[str]) -> str:
    """Import, say so, fork for who asks. Returns in a child alone: the module that it is to run."""
    line, parent = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    gc.disable()  # all but a megabyte of it stays, and to look for that takes a fifth as long as to import torch
    for module in arguments[2:]:
        importlib.import_module(module)
    if why := _unfit():
        sys.exit(f"processes are started one by one: {why}")
    return _serve(line, parent)


def split() -> ForkServer | None:
    """A fork server with all that this process has imported, which is a fork of it; None where it cannot be one.

    To be called before anything is opened that a fork should not hold, and outside of any `try`: what the server forks
    runs its program in here, and ends without a return.
    """
    if not IS_POSSIBLE or _unfit():
        return None
    server, parent = ForkServer(), os.getpid()
    pid = os.fork()
    if pid == 0:
        server._line.close()
        os.setsid()  # a signal to the group is for the process that asks
        tie_to_thread(parent)
        _run(_serve(server.theirs, parent))
        sys.exit(0)
    server.theirs.close()
    server.twin = AdoptedProcess(pid)
    return server


def torch_has_drivers() -> bool:
    """Whether this build of torch is for accelerators, so that a fork of a process that has imported it would not do.
    Where there is no torch, there are no drivers."""
    return bool(drivers_of_torch())


def drivers_of_torch() -> list[str]:
    """What this build of torch is for besides CPUs (`cuda`, `hip`, `xpu`); found out without importing it."""
    found = importlib.util.find_spec("torch")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return [name for name in _DRIVERS if any((Path(f) / "lib" / f"libtorch_{name}.so").exists() for f in folders)]


def _serve(line: socket.socket, parent: int) -> str:
    """Fork for who asks. Returns in a child alone: the module that it is to run."""
    gc.freeze()  # a collection in a child would write to every page, and so copy it
    gc.enable()
    line.sendall(READY)
    while True:
        size, given, _, _ = socket.recv_fds(line, 8, 1)
        if not size:
            os._exit(0)  # nobody is left who could ask
        told = _received(line, int.from_bytes(size, "big"))
        between = os.fork()
        if between == 0:
            if os.fork() > 0:
                os._exit(0)  # what has no parent goes to who asked
            return _begin(line, parent, given[0], *json.loads(told))
        os.waitpid(between, 0)
        os.close(given[0])


def _unfit() -> str:
    """Why a fork of this process could not do what a new one can; empty when it can."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and any(getattr(torch.version, name, None) for name in _DRIVERS):
        return "this build of torch has drivers that a fork cannot use"
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"what was imported has started {threads - 1} threads"
    return ""


def _begin(
    line: socket.socket, parent: int, output: int, module: str, arguments: list[str], environment: dict[str, str]
) -> str:
    os.setsid()
    while os.getppid() != parent:  # the process between has not ended yet
        time.sleep(0.0005)
    tie_to_thread(parent)
    line.sendall(os.getpid().to_bytes(8, "big"))
    line.close()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    _show_as([sys.executable, "-m", module, *arguments])
    return module


def _show_as(command: list[str]) -> None:
    """Be listed under this command, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    text = b"\0".join(map(os.fsencode, command))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _run(module: str) -> None:
    """Run a program to its end, and end the process with it; what it raises goes up."""
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # it may have been imported here
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    _end(code)


def _end(code: Any) -> NoReturn:
    """What an interpreter does in the end, but for taking all modules apart: that writes to each page that is shared
    with the server, a quarter of a second of a processor with torch."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    concluding: Any = threading
    concluding._shutdown()  # waits for the threads that are no daemons
    ending: Any = atexit
    ending._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    _run(main(sys.argv[1:]))
