"""On which of a share's adapters do engine and trainer disagree? The cut by adapter of the table of differences.

A run trains one adapter, and its trainer cuts what it finds by position, turn, version and replica
(`mettle.trainer.mismatch`). One engine samples for all adapters of a share, so what shows in one of them alone is that
adapter's, as where it is not loaded, and what shows in all is the engine's. Parts: `AdapterLook`, `AdapterWatch`.
Invariant: the runs are only read.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mettle.errors import MettleError
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.share_dir import Membership

FACT = "mismatch"
EVENT, GONE = "mismatch", "mismatch_gone"


@dataclass(frozen=True, slots=True)
class AdapterLook:
    """What the trainer found at its newest look at one adapter; `cause` is empty where engine and trainer agree."""

    step: int
    mean_abs: float
    num_tokens: int
    cause: str
    detail: str


class AdapterWatch:
    """The newest looks at the adapters of a share, by name."""

    def __init__(self) -> None:
        self.looks: dict[str, AdapterLook] = {}
        self._told: frozenset[tuple[str, str]] = frozenset()

    def read(self, member: Membership) -> AdapterLook | None:
        """The look at a run's adapter, if it is a new one that can be read."""
        try:
            with closing(Ledger(RunDir(member.run_dir).ledger, is_read_only=True)) as ledger:
                found = ledger.journal.fact(FACT)
        except MettleError:  # the run's own supervisor says what is wrong with it
            return None
        if not found or (member.name in self.looks and self.looks[member.name].step == found["step"]):
            return None
        look = AdapterLook(found["step"], found["mean_abs"], found["num_tokens"], found["cause"], found["detail"])
        self.looks[member.name] = look
        return look

    def fact(self) -> dict[str, Any]:
        """For the share's ledger: the table, as those of runs are, and the causes by adapter."""
        rows = [(name, look.mean_abs, look.num_tokens) for name, look in sorted(self.looks.items())]
        causes = {name: look.cause for name, look in sorted(self.looks.items()) if look.cause}
        return {"table": {"adapter": rows}, "causes": causes}

    def news(self) -> tuple[str, str] | None:
        """(kind, sentence), once for each change of what is wrong with which adapter."""
        wrong = {name: look for name, look in sorted(self.looks.items()) if look.cause}
        told, self._told = self._told, frozenset((name, look.cause) for name, look in wrong.items())
        if told == self._told:
            return None
        if not wrong:
            return GONE, "engine and trainer agree again on all adapters"
        number = len(self.looks)
        of = f"{len(wrong)} of {number} adapters" if len(wrong) < number else f"all {number} adapters"
        each = [
            f"{name} (step {look.step}, {look.mean_abs:.2g} nats on average): {look.cause}: {look.detail}"
            for name, look in wrong.items()
        ]
        return EVENT, f"engine and trainer disagree on {of}: {'; '.join(each)}"
