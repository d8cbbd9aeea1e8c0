"""Processes of this Mettle without what a new interpreter imports: `python -m mettle...` as a fork of who starts it.

Half a dozen processors' seconds of each process of a run go into importing torch and transformers. Whoever has them
already hands them on by forking: the child has a pid, a session, signals, pipes, a working directory and an environment
of its own, as after an exec, and runs the same module as `__main__`.

Parts: `ForkingPopen` (which takes the place of `subprocess.Popen`), `forked_processes` (for the length of a block),
`Nursery` (who forks for a command that has threads by now), `forked_command` (a `mettle` for shells).
Invariants: descriptors are handed on as an exec would, all others lead nowhere; no process forks while another thread
of it may hold a lock, and inside an event loop it is an ordinary new interpreter, as is whatever isn't a module of ours.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import logging
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, NoReturn

import pytest

IDLE: Final = ("MainThread", "tqdm_monitor", "RendezvousKeepAliveTimer")
"""Threads that are the one that forks, or sleep and hold nothing."""


class Program(NamedTuple):
    """What `python -m` is asked for."""

    module: str
    arguments: list[str]


@dataclass(frozen=True, slots=True)
class Birth:
    """All that a child is told, descriptors by their number in whoever asks: -1 stays as it is."""

    program: Program
    streams: tuple[int, int, int]
    passed: tuple[int, ...]
    has_session: bool
    before: Callable[[], None] | None
    cwd: str | None
    env: dict[str, str]

    def live(self, own: dict[int, int]) -> NoReturn:
        """In the child: become it. `own` has the descriptors here of those there."""
        try:
            if self.has_session:
                os.setsid()
            hand_on(self.streams, self.passed, own)
            if self.before is not None:
                self.before()
            be_new(self.cwd, self.env)
            run(self.program)
        finally:
            os._exit(70)  # never reached by what goes well


class ForkingPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, whose children that are modules of ours begin with what this process has imported."""

    modules: ClassVar[tuple[str, ...]] = ("mettle.",)
    """How the names of those begin."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
                       c2pread: int, c2pwrite: int, errread: int, errwrite: int, restore_signals: Any, gid: Any,
                       gids: Any, uid: Any, umask: Any, start_new_session: bool, *others: Any) -> None:  # fmt: skip
        ends = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        program = None if shell or executable is not None else program_of(args)
        if program is None or not (can_fork() or Nursery.here is not None):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *ends,
                restore_signals, gid, gids, uid, umask, start_new_session, *others,
            )  # fmt: skip
            return
        birth = Birth(
            program, (p2cread, c2pwrite, errwrite), tuple(map(int, pass_fds)), bool(start_new_session), preexec_fn,
            None if cwd is None else os.fspath(cwd), dict(os.environ if env is None else env),
        )  # fmt: skip
        if can_fork():
            flush()
            self.pid = os.fork()
            if self.pid == 0:
                birth.live({})
        else:
            self.pid = Nursery.here.ask(birth)
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


class Nursery:
    """A fork of a command as it was before it had threads. Whom it makes become the command's own children."""

    here: ClassVar[Any] = None

    def __init__(self) -> None:
        self._parent = os.getpid()
        self._line, line = socket.socketpair()
        flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._line.close()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            try:
                self._make(line)
            finally:
                os._exit(0)
        line.close()

    def close(self) -> None:
        """End it; whom it has made go on."""
        self._line.close()
        os.waitpid(self._pid, 0)

    def ask(self, birth: Birth) -> int:
        """The pid of a child of this process."""
        wanted = sorted({number for number in (*birth.streams, *birth.passed) if number >= 0})
        adopt(True)
        try:
            told = pickle.dumps((birth, wanted))
            socket.send_fds(self._line, [len(told).to_bytes(8, "big")], wanted)
            self._line.sendall(told)
            return int.from_bytes(self._line.recv(8), "big")
        finally:
            adopt(False)

    def _make(self, line: socket.socket) -> None:
        while True:
            size, given, _, _ = socket.recv_fds(line, 8, 64)
            if not size:
                return  # the command has ended
            told = b""
            while len(told) < int.from_bytes(size, "big"):
                told += line.recv(1 << 16)
            birth, wanted = pickle.loads(told)
            between = os.fork()
            if between == 0:
                if os.fork() > 0:
                    os._exit(0)  # what has no parent any more goes to the command
                while os.getppid() != self._parent:
                    time.sleep(0.001)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
                line.sendall(os.getpid().to_bytes(8, "big"))
                birth.live(dict(zip(wanted, given, strict=True)))
            os.waitpid(between, 0)
            for number in given:
                os.close(number)


SHIM: Final = """\
import json, os, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
told = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(line, [len(told).to_bytes(8, "big")], [0, 1, 2])
line.sendall(told)
sys.exit(int.from_bytes(line.recv(1), "big"))
"""


@contextlib.contextmanager
def forked_command(script: Path, module: str = "mettle.cli") -> Iterator[None]:
    """While it is open, `script` is a program for shells: it hands all that it was given to a fork of this process.

    The fork runs `module`; by default the program is `mettle`.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address, shim = Path(folder) / "line", Path(folder) / "shim.py"
        listener.bind(str(address))
        listener.listen()
        shim.write_text(SHIM)
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{shim}" "{address}" "$@"\n')
        script.chmod(0o755)
        flush()
        server = os.fork()
        if server == 0:
            try:
                serve(listener, module)
            finally:
                os._exit(0)
        try:
            yield
        finally:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)


def serve(listener: socket.socket, module: str) -> NoReturn:
    """Run what comes, each in a process of its own, and tell how it ended."""
    while True:
        line, _ = listener.accept()
        size, given, _, _ = socket.recv_fds(line, 8, 3)
        told = b""
        while len(told) < int.from_bytes(size, "big"):
            told += line.recv(1 << 16)
        arguments, cwd, env = json.loads(told)
        if os.fork() == 0:
            child = os.fork()
            if child == 0:
                Birth(Program(module, arguments), (0, 1, 2), (), False, None, cwd, env).live(dict(enumerate(given)))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            line.sendall(bytes([code if code >= 0 else 128 - code]))
            os._exit(0)
        for number in given:
            os.close(number)
        line.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def adopt(is_on: bool) -> None:
    """Whether the children of children that end come to this process."""
    ctypes.CDLL(None).prctl(36, int(is_on))  # PR_SET_CHILD_SUBREAPER


def flush() -> None:
    """Nothing that is printed already is printed again by a child."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()


@contextlib.contextmanager
def forked_processes(*modules: str) -> Iterator[None]:
    """Processes of ours that are started within the block, and those that they start, are forks; of all, or of some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkingPopen, "modules", modules or ForkingPopen.modules)
        patch.setattr(subprocess, "Popen", ForkingPopen)
        yield


def can_fork() -> bool:
    """Whether nobody else in this process can hold a lock."""
    return asyncio._get_running_loop() is None and all(each.name.startswith(IDLE) for each in threading.enumerate())


def program_of(args: Any) -> Program | None:
    """The module of ours, or the launcher of ranks, that a command runs in this interpreter; None if it is another."""
    if isinstance(args, str | bytes | os.PathLike) or args[0] != sys.executable:
        return None
    words = [str(word) for word in args[1:] if word != "-u"]
    if words[:1] != ["-m"] or not words[1].startswith(ForkingPopen.modules):
        return None
    return Program(words[1], words[2:])


def hand_on(streams: tuple[int, int, int], passed: tuple[int, ...], own: dict[int, int]) -> None:
    """Standard streams and `passed` stay; every other descriptor leads nowhere, and its number isn't given again.

    Were they closed, an object of the parent's that is collected later would close what has its number by then.
    """
    wanted = {target: source for target, source in enumerate(streams) if source >= 0} | {n: n for n in passed}
    kept = {target: fcntl.fcntl(own.get(source, source), fcntl.F_DUPFD, 512) for target, source in wanted.items()}
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept.values():
            with contextlib.suppress(OSError):  # the one that listed
                os.fstat(int(name))
                os.dup2(nowhere, int(name), inheritable=False)
    for target, source in kept.items():
        os.dup2(source, target)
        os.close(source)


def be_new(cwd: Any, env: Any) -> None:
    """What an interpreter has before its program: none of the tests' handlers, hooks, filters and environment."""
    warnings.simplefilter("ignore")  # of files that tests before have left open, which go from here on
    gc.freeze()
    importlib.invalidate_caches()
    atexit._clear()
    faulthandler.disable()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    for logger in (logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))):
        logger.handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # the tests have imported it
    if cwd is not None:
        os.chdir(cwd)
    if env is not None:
        known = (os.environ.get("PYTHONPATH") or "").split(os.pathsep)
        os.environ.clear()
        os.environ.update(env)
        sys.path[:0] = [p for p in (os.environ.get("PYTHONPATH") or "").split(os.pathsep) if p and p not in known]
    sys.path.insert(0, os.getcwd())


def run(program: Program) -> None:
    """Run a module as the program of this process, and end the process as Python would."""
    sys.argv = ["-m", *program.arguments]
    Nursery.here = Nursery() if program.module == "mettle.cli" else None
    code: object = 0
    try:
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush()
    os._exit(int(code or 0) & 0xFF)
