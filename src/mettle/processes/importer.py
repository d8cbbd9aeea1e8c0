"""A fork server that begins to import when the first process wants to start from it, or before.

Parts: `Importer`. Invariant: until it is decided whether it can fork nobody need start; where it can't, each process
has an interpreter of its own and does the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mettle.processes.child import ChildProcess, python_module
from mettle.processes.fork_server import ForkServer
from mettle.processes.managed import ENVIRONMENT


class Importer:
    """Imports `modules` in a process of its own, whose output is a file."""

    def __init__(self, modules: Sequence[str], output: Path) -> None:
        self.server = ForkServer()
        self._modules, self._output = modules, output
        self._process: ChildProcess | None = None

    def has_decided(self) -> bool:
        """Whether it is known if it can fork. The first to ask begins the import."""
        self.begin()
        return not self.server.is_importing

    def begin(self) -> None:
        """Begin the import; once is enough."""
        if self._process is not None:
            return
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
