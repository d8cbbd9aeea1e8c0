"""Where the supervisor's processes run: on this machine, or wherever a cluster places them.

Parts: `SupervisedProcess` (what the supervisor needs of a process, wherever it is), `Launcher` (what makes them),
`LocalLauncher`. Invariant: the supervisor decides when a process starts and ends; a launcher decides only where.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Protocol

from mettle.processes.managed import ManagedProcess, ProcessSpec
from mettle.runs.host import HostNews


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

    def news(self) -> list[HostNews]:
        """What happened to the places since the last call."""
        ...

    def close(self) -> None:
        """Give every place back. Whatever still runs there ends."""
        ...


class LocalLauncher:
    """Children of this process, on this machine. What they print goes to files in `logs`."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    def process(self, spec: ProcessSpec) -> SupervisedProcess:
        """A child."""
        return ManagedProcess(spec, self._logs / f"{spec.name}.out")

    def news(self) -> list[HostNews]:
        """What happens to this host is told by `HostWatch`."""
        return []

    def close(self) -> None:
        """The supervisor has ended its children."""
