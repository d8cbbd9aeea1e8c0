"""Where the supervisor's processes run: on this machine, or wherever a cluster places them.

Parts: `SupervisedProcess` (what the supervisor needs of a process, wherever it is), `Launcher` (what makes them),
`LocalLauncher`. Invariant: the supervisor decides when a process starts and ends; a launcher decides only where.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mettle.processes import fork_server
from mettle.processes.fork_server import ForkServer
from mettle.processes.importer import Importer
from mettle.processes.managed import ManagedProcess, ProcessSpec
from mettle.runs.host import HostNews

FORKED = frozenset({
    "mettle.trainer", "mettle.trainer.sharing", "mettle.trainer.sft", "mettle.trainer.initial", "mettle.inference",
})  # fmt: skip
"""What spends most of its start on importing torch and transformers."""
IMPORTS = ("mettle.trainer.process", "mettle.inference.process", "mettle.inference.engine.embedded")
"""And all of that."""
MEMBER, ORCHESTRATOR = "mettle.runs.member", "mettle.orchestrator"
IMPORTS_OF_RUNS = ("mettle.runs.launch", "mettle.orchestrator.__main__", "mettle.orchestrator.environments")
"""What a share's runs import each: a second or two of a processor, and most of the memory of both of a run's processes.
Without torch, so that nothing is held twice."""


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

    With `imports`, those that need them (`FORKED`) are forks of one process that has imported them; with `for_runs`, so
    are the supervisors of a share's runs (`MEMBER`). `twin` is a fork of this process, for an orchestrator; `begun` has
    begun to import `IMPORTS` already.
    """

    def __init__(
        self,
        logs: Path,
        imports: Sequence[str] = (),
        *,
        for_runs: Sequence[str] = (),
        twin: ForkServer | None = None,
        begun: Importer | None = None,
    ) -> None:
        self._logs = logs
        self._twin = twin
        self._for_torch = begun or importer_of(imports, logs / "fork-server.out")
        self._for_runs = importer_of(for_runs, logs / "fork-server-of-runs.out")

    def process(self, spec: ProcessSpec) -> SupervisedProcess:
        """A child."""
        return ManagedProcess(spec, self._logs / f"{spec.name}.out", self.server(spec.module))

    def server(self, module: str) -> ForkServer | None:
        """What processes of this module are forks of; None where each has an interpreter of its own."""
        if module == ORCHESTRATOR:
            return self._twin
        importer = self._importer_of(module)
        return None if importer is None else importer.server

    def can_start(self, spec: ProcessSpec) -> bool:
        """What is forked waits until all is imported, or it is clear that nothing will be."""
        importer = self._importer_of(spec.module)
        return importer is None or importer.has_decided()

    def _importer_of(self, module: str) -> Importer | None:
        return self._for_torch if module in FORKED else self._for_runs if module == MEMBER else None

    def pids(self) -> list[int]:
        """Those that fork."""
        twin = None if self._twin is None or self._twin.twin is None else self._twin.twin.pid
        return [pid for pid in (*(each.pid for each in self._importers), twin) if pid is not None]

    @property
    def _importers(self) -> list[Importer]:
        return [each for each in (self._for_torch, self._for_runs) if each is not None]

    def news(self) -> list[HostNews]:
        """What happens to this host is told by `HostWatch`."""
        return []

    def close(self) -> None:
        """The supervisor has ended its children."""
        for importer in self._importers:
            importer.close()


def importer_of(modules: Sequence[str], output: Path) -> Importer | None:
    """A process that imports these and prints to `output`; None where nothing could be a fork of it."""
    if not modules or not fork_server.IS_POSSIBLE or (modules == IMPORTS and fork_server.torch_has_drivers()):
        return None
    return Importer(modules, output)
