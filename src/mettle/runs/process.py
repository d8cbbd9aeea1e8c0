"""One child process: started in its own session, tied to its parent's life, its output kept, its end explained.

A child dies with its supervisor (the kernel sends SIGKILL), so a killed supervisor leaves no orphans; every room
keeps what matters on disk, so that is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mettle.errors import ServiceError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

THREAD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""One thread a process: with two on busy cores decoding was 4 to 15 times slower."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to start. `ready_file` appears when a server can answer; None for a worker, which is ready when it runs.

    `is_service` means that the process should never end by itself, so that even exit code 0 is followed by a restart.
    `after` names the processes that must be ready (servers) or done (the others) before this one starts.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    ready_file: Path | None = None
    ready_timeout_s: float = 120.0
    is_service: bool = False
    after: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class ManagedProcess:
    """A started `ProcessSpec`."""

    def __init__(self, spec: ProcessSpec, output: Path) -> None:
        self.spec = spec
        self._output = output
        self._popen: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    def start(self) -> None:
        """Start the process; a stale ready file is removed first."""
        if self.spec.ready_file is not None:
            self.spec.ready_file.parent.mkdir(parents=True, exist_ok=True)
            self.spec.ready_file.unlink(missing_ok=True)
        self._output.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **THREAD_ENVIRONMENT, "PYTHONUNBUFFERED": "1", **self.spec.environment}
        with self._output.open("ab") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", self.spec.module, *self.spec.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=functools.partial(_die_with_parent, os.getpid()),
            )
        self.started_at = time.monotonic()

    def exit_code(self) -> int | None:
        """None while the process runs; negative is the signal that ended it."""
        return None if self._popen is None else self._popen.poll()

    def endpoint(self) -> dict[str, Any] | None:
        """What the ready file says, or None while there is none (or no longer this process's)."""
        if self.spec.ready_file is None:
            return None
        try:
            found: dict[str, Any] = json.loads(self.spec.ready_file.read_text())
        except (OSError, ValueError):
            return None
        return found

    def is_ready(self) -> bool:
        """True when the process runs and, if it is a server, has said that it can answer."""
        return self.exit_code() is None and (self.spec.ready_file is None or self.endpoint() is not None)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and the children it may have."""
        if self._popen is None or self._popen.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, number)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; None when it has not come in time."""
        assert self._popen is not None, "only a started process can be waited for"
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, *, grace_s: float = 5.0) -> None:
        """Ask the process to end, and end it if it does not."""
        self.signal(signal.SIGTERM)
        if self.wait(grace_s) is None:
            self.signal(signal.SIGKILL)
            self.wait(grace_s)

    def last_line(self) -> str:
        """The last thing the process printed: the one line that says why it ended."""
        line = last_line(self._output)
        for prefix in ("error: ", f"{self.spec.module}: ", f"{self.spec.module.replace('.', ' ')}: "):
            line = line.removeprefix(prefix)
        return line

    def memory_bytes(self) -> int:
        """Proportional set size of the process (its share of what it shares); 0 when it is gone."""
        if self._popen is None or self._popen.poll() is not None:
            return 0
        return process_memory_bytes(self._popen.pid)


def process_memory_bytes(pid: int) -> int:
    """Proportional set size of a process; 0 when it is gone or the host does not say."""
    try:
        with Path(f"/proc/{pid}/smaps_rollup").open() as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0


def last_line(path: Path) -> str:
    """The last line of a file that says something; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, _size(file) - 4096))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def explain_exit(name: str, code: int, line: str) -> str:
    """One sentence about how a process ended."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{name} {how}" + (f": {line}" if line else "")


def wait_ready(process: ManagedProcess, *, poll_s: float = 0.05) -> dict[str, Any]:
    """Wait until a server is ready and return its endpoint.

    Raises: ServiceError if it ends first or takes longer than its time.
    """
    deadline = time.monotonic() + process.spec.ready_timeout_s
    while not process.is_ready():
        code = process.exit_code()
        if code is not None:
            raise ServiceError(explain_exit(process.spec.name, code, process.last_line()))
        if time.monotonic() > deadline:
            raise ServiceError(f"{process.spec.name} was not ready after {process.spec.ready_timeout_s:.0f} s")
        time.sleep(poll_s)
    return process.endpoint() or {}


def module_command(module: str, arguments: Sequence[str]) -> str:
    """The command line that starts a module by hand, for logs."""
    return " ".join(["python", "-m", module, *arguments])


def _die_with_parent(parent: int) -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent died before the line above took effect.
            os.kill(os.getpid(), signal.SIGKILL)


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size
