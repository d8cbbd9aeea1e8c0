"""Where a worker gets its evaluations from: the contract between it and the queue, and nothing of either.

Two implementations: `local_queue.LocalQueue` (the Hub's own machine, on its database and folder) and
`mettle.hub.machines.remote_queue.RemoteQueue` (a machine that has joined, over HTTP). `tests/hub/machines` holds both
to the same tests. Invariant: a worker that was told LOST reports nothing more of that work, and whoever gets it next
goes on with the rollouts that were stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

LOG: Final = "log"
"""What the program of an evaluation prints, in its folder."""


class LeaseWord(Enum):
    """What a worker hears when it reports."""

    GO_ON = "go_on"
    STOP = "stop"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class EvaluationWork:
    """One evaluation to run. `folder` has its order and takes its rollouts; `environment` is all that its process
    inherits."""

    job_id: str
    folder: Path
    environment: dict[str, str]
    lease_id: str = ""


class EvaluationSource(Protocol):
    """Raises from each call: MettleError where the queue cannot be asked now; the worker asks again later."""

    def take(self) -> EvaluationWork | None:
        """The next one, with its folder as it was left by whoever had it before; None when nothing waits."""
        ...

    def report(self, work: EvaluationWork) -> LeaseWord:
        """Say that it is worked on, and make known what it has written."""
        ...

    def end(self, work: EvaluationWork, code: int) -> None:
        """Its process has ended; what it wrote counts, once, unless the work was lost."""
        ...

    def give_back(self, work: EvaluationWork) -> None:
        """Its process was ended before it was done: another goes on with what is stored."""
        ...
