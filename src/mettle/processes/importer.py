"""A fork server that begins to import when the first process wants to start from it, or before.

Parts: `Importer`. Invariant: until it is decided whether it can fork nobody need start; where it can't, or is frozen in
the middle of an import, each process has an interpreter of its own and does the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from mettle.processes.child import ChildProcess, python_module
from mettle.processes.fork_server import ForkServer
from mettle.processes.managed import ENVIRONMENT

PATIENCE_S = 180.0
"""Torch takes two seconds, and fifty on a host where thirty others want the cores."""


class Importer:
    """Imports `modules` in a process of its own, whose output is a file."""

    def __init__(self, modules: Sequence[str], output: Path) -> None:
        self.server = ForkServer()
        self._modules, self._output = modules, output
        self._process: ChildProcess | None = None
        self._begun_at = 0.0

    def has_decided(self) -> bool:
        """Whether it is known if it can fork. The first to ask begins the import."""
        self.begin()
        if self.server.is_importing and time.monotonic() - self._begun_at > PATIENCE_S:
            assert self._process is not None, "it has begun"
            self._process.kill()
            self.server.close()
        return not self.server.is_importing

    def begin(self) -> None:
        """Begin the import; once is enough."""
        if self._process is not None:
            return
        self._begun_at = time.monotonic()
        with self.server.theirs as theirs:
            command = python_module("mettle.processes.fork_server", str(theirs.fileno()), str(os.getpid()))
            self._process = ChildProcess(
                [*command, *self._modules],
                tie="thread",
                output=self._output,
                environment=ENVIRONMENT,
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return None if self._process is None or self._process.exit_code() is not None else self._process.pid

    def close(self) -> None:
        """Nothing more is asked of it, so it ends."""
        self.server.close()
        if self._process is not None:
            self._process.end()
