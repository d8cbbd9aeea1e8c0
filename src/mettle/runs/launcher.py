"""Where the supervisor's processes run: on this machine, or wherever a cluster places them.

Parts: `SupervisedProcess` (what the supervisor needs of a process, wherever it is), `Launcher` (what makes them),
`LocalLauncher`. Invariant: the supervisor decides when a process starts and ends; a launcher decides only where.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mettle.processes import fork_server
from mettle.processes.child import ChildProcess, python_module
from mettle.processes.fork_server import ForkServer
from mettle.processes.managed import ENVIRONMENT, ManagedProcess, ProcessSpec
from mettle.runs.host import HostNews

FORKED = frozenset({
    "mettle.trainer", "mettle.trainer.sharing", "mettle.trainer.sft", "mettle.trainer.initial", "mettle.inference",
})  # fmt: skip
"""What spends most of its start on importing torch and transformers."""
IMPORTS = ("mettle.trainer.process", "mettle.inference.process", "mettle.inference.engine.embedded")
"""And all of that."""


class SupervisedProcess(Protocol):
    """A process that can be started again. `host` is empty for one of this machine, whose pid means something here."""

    @property
    def spec(self) -> ProcessSpec: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def host(self) -> str: ...

    @property
    def started_at(self) -> float:
        """Monotonic seconds. One that still waits for a place has not started."""
        ...

    def start(self) -> None: ...

    def exit_code(self) -> int | None:
        """None while it runs or waits for a place; negative is the signal that ended it."""
        ...

    def endpoint(self) -> dict[str, Any] | None: ...

    def remove_ready_file(self) -> None: ...

    def is_ready(self) -> bool: ...

    def signal(self, number: signal.Signals) -> None: ...

    def wait(self, timeout_s: float | None = None) -> int | None: ...

    def last_line(self) -> str: ...


class Launcher(Protocol):
    """Makes the processes of one run."""

    def process(self, spec: ProcessSpec) -> SupervisedProcess:
        """The process of a spec, not started yet."""
        ...

    def can_start(self, spec: ProcessSpec) -> bool:
        """False while what the process begins with is still being made."""
        ...

    def pids(self) -> list[int]:
        """Processes of this machine that belong to the run and are none of its `specs`."""
        ...

    def news(self) -> list[HostNews]:
        """What happened to the places since the last call."""
        ...

    def close(self) -> None:
        """Give every place back. Whatever still runs there ends."""
        ...


class LocalLauncher:
    """Children of this process, on this machine. What they print goes to files in `logs`.

    With `imports`, those that need them (`FORKED`) are forks of one process that has imported them.
    """

    def __init__(self, logs: Path, imports: Sequence[str] = ()) -> None:
        self._logs = logs
        self._imports = imports
        self._fork_server = ForkServer() if imports and fork_server.IS_POSSIBLE else None
        self._importer: ChildProcess | None = None

    def process(self, spec: ProcessSpec) -> SupervisedProcess:
        """A child."""
        server = self._fork_server if spec.module in FORKED else None
        return ManagedProcess(spec, self._logs / f"{spec.name}.out", server)

    def can_start(self, spec: ProcessSpec) -> bool:
        """What is forked waits until all is imported, or it is clear that nothing will be."""
        if self._fork_server is None or spec.module not in FORKED:
            return True
        if self._importer is None:
            self._importer = self._import(self._fork_server)
        return not self._fork_server.is_importing

    def _import(self, server: ForkServer) -> ChildProcess:
        with server.theirs as theirs:
            command = python_module("mettle.processes.fork_server", str(theirs.fileno()), str(os.getpid()))
            return ChildProcess(
                [*command, *self._imports],
                tie="thread",
                output=self._logs / "fork-server.out",
                environment=ENVIRONMENT,
                pass_fds=[theirs.fileno()],
            )

    def pids(self) -> list[int]:
        """The one that forks."""
        return [self._importer.pid] if self._importer is not None and self._importer.exit_code() is None else []

    def news(self) -> list[HostNews]:
        """What happens to this host is told by `HostWatch`."""
        return []

    def close(self) -> None:
        """The supervisor has ended its children."""
        if self._fork_server is not None:
            self._fork_server.close()
        if self._importer is not None:
            self._importer.end()
