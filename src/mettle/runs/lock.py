"""The lock of a run: at most one supervisor, and a way to find it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable

from mettle.errors import UserError
from mettle.processes.child import is_ending
from mettle.storage.run_dir import RunDir

PATIENCE_S = 0.5
"""Somebody who asks for the supervisor's pid holds the lock for an instant; that is no other supervisor."""
ENDING_S = 60.0
"""A supervisor that was killed holds its lock until the kernel has taken it down: seconds on a host that is overloaded,
and whoever resumes the run right after the kill must wait for that."""


class RunLock:
    """At most one supervisor a run: an advisory lock on `supervisor.lock`, released by the kernel when we die."""

    def __init__(self, run_dir: RunDir, *, is_ending: Callable[[int], bool] = is_ending) -> None:
        self._path = run_dir.path / "supervisor.lock"
        self._is_ending = is_ending
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def __enter__(self) -> RunLock:
        began = time.monotonic()
        while not self._take():
            waited_s = time.monotonic() - began
            if waited_s > PATIENCE_S:
                pid = supervisor_pid(RunDir(self._path.parent))
                if pid is None and self._take():  # it was given up between the two looks
                    break
                if pid is not None and waited_s < ENDING_S and self._is_ending(pid):
                    time.sleep(0.05)
                    continue
                os.close(self._handle)
                name = self._path.parent.name
                if pid is None:
                    raise UserError(f"processes of run {name} were started alone and still run; end them first")
                raise UserError(
                    f"run {name} is already running (pid {pid}); `mettle rl stop {self._path.parent}` ends it"
                )
            time.sleep(0.05)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        return self

    def _take(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)


def supervisor_host(run_dir: RunDir) -> str:
    """The machine that the newest supervisor ran on; a run in a shared folder may have one elsewhere."""
    try:
        return str(json.loads((run_dir.path / "supervisor.lock").read_text())["host"])
    except (OSError, ValueError, KeyError):
        return socket.gethostname()


def supervisor_pid(run_dir: RunDir) -> int | None:
    """The pid of the supervisor that holds the run's lock now, or None when nobody does."""
    path = run_dir.path / "supervisor.lock"
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        text = os.pread(handle, 200, 0)
        return int(json.loads(text)["pid"]) if text else None
    finally:
        os.close(handle)
