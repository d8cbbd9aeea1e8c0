"""An evaluation that is open: its reader, its figures, which rollouts are shown, and what is looked for.

Parts: `OpenRun`. The screens of a run, a rollout and a task share one. Invariant: reading, counting and searching
happen in threads; whoever draws finds the last complete answer and never waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle.evals.facts import RolloutFacts
from mettle.evals.reader import EvaluationReader
from mettle.evals.report import plain
from mettle.evals.results import METADATA
from mettle.storage.evals import INTERRUPTED
from mettle.tui.search import Needle
from mettle.tui.selection import Selection
from mettle.wording import ago, whole


@contextmanager
def well_formed(path: Path) -> Iterator[None]:
    """What is read in the block may hold anything; what cannot be worked with is the file's fault, and said so."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(f"{path / METADATA} is not as evaluations are saved: {error}") from error


LIVE_S = 30.0
"""An unfinished evaluation whose file grew this recently is shown as running."""


class OpenRun:
    """One evaluation. Raises: UserError, StorageError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        with well_formed(path):
            self.reader = EvaluationReader(path)
            self.selection = Selection(self.reader)
            self.stats: Mapping[str, Any] = plain(self.reader.stats())
            self.progress()
        self.needle: Needle | None = None
        self.found: set[int] = set()
        self.looked_at: int | None = None
        """How many rollouts the search has been through, None when it is over."""

    @property
    def name(self) -> str:
        """The run by its folder, with the number of the evaluation where it has several."""
        return Path(self.reader.entry.name).name

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics."""
        return list(self.stats["metrics"])

    def facts(self, index: int) -> RolloutFacts | None:
        """The figures of a rollout; None when the file has become shorter."""
        facts = self.reader.facts
        return facts[index] if index < len(facts) else None

    def refresh(self) -> bool:
        """Take in what was added since; whether anything was. For a thread."""
        before = len(self.reader)
        with well_formed(self.reader.path):
            grown = self.reader.refresh()
            if not grown and len(self.reader) == before:
                return False
            self.reader.metadata = self.reader.entry.metadata or self.reader.metadata
            self.stats = plain(self.reader.stats())
        return True

    def progress(self, now: float | None = None) -> str:
        """How far an unfinished evaluation is; nothing for a finished one."""
        entry, there = self.reader.entry, len(self.reader)
        planned = entry.num_planned
        if (entry.eval_id is not None and entry.is_complete) or "stats" in entry.metadata:
            return ""
        if planned is None or there >= planned:
            return ""
        now = time.time() if now is None else now
        written = [_written_at(entry.path / name) for name in ("results.jsonl", "run.db", "run.db-wal")]
        changed = max((at for at in written if at is not None), default=None)
        if changed is None:
            return "gone"
        state = "live" if now - changed < LIVE_S and entry.state != INTERRUPTED else "unfinished"
        return f"{state}, {whole(there)} of {whole(planned)}, last {ago(changed, now)}"

    def members(self, example_id: Any) -> list[int]:
        """The rollouts of one task."""
        return [index for index, facts in enumerate(self.reader.facts) if facts.example_id == example_id]

    def next_found(self, after: int, step: int, order: list[int] | None = None) -> int | None:
        """The rollout that holds what is looked for and comes next in the order, from the other end if need be."""
        order = self.selection.order if order is None else order
        places = [place for place, index in enumerate(order) if index in self.found]
        if not places:
            return None
        here = order.index(after) if after in order else -1
        if step > 0:
            return order[next((place for place in places if place > here), places[0])]
        return order[next((place for place in reversed(places) if place < here), places[-1])]


def _written_at(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None
