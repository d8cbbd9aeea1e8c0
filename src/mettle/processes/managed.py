"""A child that can be started again and says when it is ready: a server, a worker of a run.

Parts: `ProcessSpec` (what to start), `ManagedProcess`, `wait_ready`. Invariant: a ready file belongs to the process
that runs, because a stale one is removed before each start.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.errors import ServiceError
from mettle.processes.child import (
    THREAD_ENVIRONMENT,
    ChildProcess,
    explain_exit,
    last_line,
    process_memory_bytes,
    python_module,
)
from mettle.processes.fork_server import ForkServer
from mettle.processes.ready_file import ReadyFile

ENVIRONMENT = {**THREAD_ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
"""Of every process that is managed, and of what it is forked from."""
WHO_SAYS = re.compile(r"^((error|mettle([. ]\w+)*): )+")
"""Ahead of what a program says that ends: the program may have been started by another, as ranks are."""


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
    """A `ProcessSpec` and the process that it is now. Start it from a thread that lives as long as the process.

    Where there is a `server` that can fork, the process begins as a fork of it.
    """

    host = ""
    """A child is always of this machine."""

    def __init__(self, spec: ProcessSpec, output: Path, server: ForkServer | None = None) -> None:
        self.spec = spec
        self._fork_server = server
        self._ready = ReadyFile(spec.ready_file)
        self._output = output
        self._child: ChildProcess | None = None
        self.started_at = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the process; a stale ready file is removed first."""
        self._ready.prepare()
        self._child = self._forked() or ChildProcess(
            python_module(self.spec.module, *self.spec.arguments),
            tie="thread",
            output=self._output,
            environment={**ENVIRONMENT, **self.spec.environment},
        )
        self.started_at = time.monotonic()

    def _forked(self) -> ChildProcess | None:
        if self._fork_server is None or not self._fork_server.is_ready:
            return None
        environment = {**ENVIRONMENT, **self.spec.environment}
        try:
            return ChildProcess.forked(
                self._fork_server, self.spec.module, *self.spec.arguments, output=self._output, environment=environment
            )
        except OSError:  # the fork server is gone: that costs seconds, and nothing else
            return None

    def exit_code(self) -> int | None:
        """None while the process runs; negative is the signal that ended it."""
        return None if self._child is None else self._child.exit_code()

    def endpoint(self) -> dict[str, Any] | None:
        """What the ready file says, or None while there is none (or no longer this process's)."""
        return self._ready.endpoint()

    def remove_ready_file(self) -> None:
        """The process is gone."""
        self._ready.remove()

    def is_ready(self) -> bool:
        """True when the process runs and, if it is a server, has said that it can answer."""
        return self.exit_code() is None and self._ready.is_satisfied

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and the children it may have."""
        if self._child is not None:
            self._child.signal(number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end; None when it has not come in time."""
        assert self._child is not None, "only a started process can be waited for"
        return self._child.wait(timeout_s)

    def end(self, *, grace_s: float = 5.0) -> None:
        """Ask the process to end, and end it if it does not."""
        if self._child is not None:
            self._child.end(grace_s=grace_s)
            self.remove_ready_file()

    def last_line(self) -> str:
        """The last thing the process printed: the one line that says why it ended."""
        return WHO_SAYS.sub("", last_line(self._output))

    def memory_bytes(self) -> int:
        """Proportional set size of the process (its share of what it shares); 0 when it is gone."""
        return (
            0 if self._child is None or self._child.exit_code() is not None else process_memory_bytes(self._child.pid)
        )


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
