"""The runs there are: a folder of run directories, or one run; and the evaluations of the workspace.

Keeps the readers of the runs that were looked at last open, and what the list shows of the others for as long as their
files do not change. A look at the folder asks the system for three times of each run and opens none of them.
Invariant: a name from outside is only ever compared with the names that are there, never joined to a path.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mettle.errors import MettleError, StorageError, UserError
from mettle.hub.evaluations import EvaluationCatalog
from mettle.hub.models import RunCard
from mettle.hub.reader import RunReader, inode_of, written_ns
from mettle.hub.summary import LIVE_STATES, card_of, summarise
from mettle.storage.run_dir import RunDir

MAX_OPEN = 8


@dataclass(frozen=True, slots=True)
class SeenRun:
    """A run directory as a look at it shows it: when the directory, its ledger and the ledger's log were written.

    Whoever reads a ledger leaves an empty log beside it, which changes the directory and is no writing.
    """

    path: Path
    times: tuple[int, int, int]

    @property
    def written_at(self) -> int:
        directory, ledger, log = self.times
        return max(ledger, log) or directory


class RunCatalog:
    """Finds and opens runs under `root`."""

    def __init__(self, root: Path, *, workspace: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.root = root.resolve()
        self.evaluations = EvaluationCatalog(workspace, self._kinds_now, runs_root=self.root)
        self._clock = clock
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, RunReader] = OrderedDict()
        self._cards: dict[str, tuple[tuple[int, int, int], RunCard]] = {}
        self._kinds: dict[str, tuple[tuple[int, int, int], bool]] = {}

    def names(self) -> list[str]:
        """The runs there are, those written last first."""
        return [seen.path.name for seen in sorted(self._look(), key=lambda seen: seen.written_at, reverse=True)]

    def open(self, name: str) -> RunReader:
        """The reader of a run.

        Raises: UserError when there is no such run, StorageError when its ledger cannot be read.
        """
        path = self._find(name)
        if path is None:
            raise UserError(f"There is no run named {name!r} here.")
        return self._open(path)

    def _open(self, path: Path) -> RunReader:
        """The reader of a directory that a look has found."""
        name, run_dir = path.name, RunDir(path)
        if not run_dir.ledger.exists():
            raise StorageError(f"The run {name} has no run.db: it has not started yet, or the file was removed.")
        with self._lock:
            reader = self._readers.pop(name, None)
            if reader is not None and reader.inode != inode_of(run_dir.ledger):
                reader.close()
                reader = None
            if reader is None:
                reader = RunReader(run_dir, clock=self._clock)
            self._readers[name] = reader
            while len(self._readers) > MAX_OPEN:
                # Not closed here: another thread may be reading it. The last reference closes it.
                self._readers.popitem(last=False)
        return reader

    def cards(self) -> list[RunCard]:
        """What the list of runs shows, newest first; a run that cannot be read says why."""
        return _by_state_and_start([self._card(seen) for seen in self._training()])

    def page_of_cards(self, number: int, size: int) -> tuple[list[RunCard], int]:
        """A page of that list, those written last on the first, and how many runs there are in all.

        Only the runs of the page are opened; what goes on is written to, and stands on the first.
        """
        seen = self._training()
        cards = [self._card(each) for each in seen[(number - 1) * size : number * size]]
        return _by_state_and_start(cards), len(seen)

    def warm_up(self, is_over: Callable[[], bool]) -> None:
        """Read what lists show of each run that nobody has looked at yet, until `is_over` says so.

        For a thread of its own when a server begins: a list opens only runs that it has not seen as they are, and each
        costs milliseconds.
        """
        self._look_closer(is_over)
        for seen in self._training():
            if is_over():
                return
            self._card(seen)

    def _card(self, seen: SeenRun) -> RunCard:
        name, ledger = seen.path.name, RunDir(seen.path).ledger
        stamp = (*seen.times[1:], inode_of(ledger))
        kept = self._cards.get(name)
        if kept is not None and kept[0] == stamp and kept[1].state not in LIVE_STATES:
            return kept[1]
        try:
            reader = self._open(seen.path)
            with reader.lock:
                card = card_of(summarise(reader), reader)
        except MettleError as error:
            card = unreadable(name, "unreadable" if ledger.exists() else "new", str(error))
        self._cards[name] = (stamp, card)
        return card

    def is_evaluation(self, folder: Path) -> bool:
        """True for a run directory without a trainer, which stands among the evaluations."""
        return self.evaluations.is_own(folder)

    def _training(self) -> list[SeenRun]:
        """The runs with a trainer, those written last first."""
        found = [seen for seen, is_evaluation in self._look_closer() if not is_evaluation]
        return sorted(found, key=lambda seen: seen.written_at, reverse=True)

    def _kinds_now(self) -> dict[Path, bool]:
        return {seen.path: is_evaluation for seen, is_evaluation in self._look_closer()}

    def _look_closer(self, is_over: Callable[[], bool] = lambda: False) -> list[tuple[SeenRun, bool]]:
        """The runs, and whether each is an evaluation without a trainer; looked up again when it was written."""
        kinds: dict[str, tuple[tuple[int, int, int], bool]] = {}
        found = []
        for seen in self._look():
            if is_over():
                break
            kept = self._kinds.get(seen.path.name)
            if kept is None or kept[0] != seen.times:
                kept = seen.times, self.is_evaluation(seen.path)
            kinds[seen.path.name] = self._kinds[seen.path.name] = kept
            found.append((seen, kept[1]))
        self._kinds = kinds
        return found

    def _find(self, name: str) -> Path | None:
        if self._is_run(str(self.root)):
            return self.root if name == self.root.name else None
        try:
            is_there = not name.startswith(".") and name in os.listdir(self.root)
        except OSError:
            return None
        path = self.root / name
        return path if is_there and path.is_dir() and self._is_run(str(path)) else None

    def _look(self) -> list[SeenRun]:
        root = str(self.root)
        if self._is_run(root):
            return [SeenRun(self.root, self._times(root))]
        found = []
        try:
            with os.scandir(root) as entries:
                for entry in entries:
                    if not entry.name.startswith(".") and entry.is_dir():
                        times = self._times(entry.path)
                        if times[1] or self._is_run(entry.path):
                            found.append(SeenRun(self.root / entry.name, times))
        except OSError:
            return []
        return found

    @staticmethod
    def _is_run(path: str) -> bool:
        return any(os.path.exists(f"{path}/{name}") for name in ("run.db", "run.toml", "endpoints"))

    @staticmethod
    def _times(path: str) -> tuple[int, int, int]:
        return written_ns(path), written_ns(f"{path}/run.db"), written_ns(f"{path}/run.db-wal")


def _by_state_and_start(cards: list[RunCard]) -> list[RunCard]:
    return sorted(cards, key=lambda card: (card.state in LIVE_STATES, card.started_at or 0.0), reverse=True)


def unreadable(name: str, state: str, problem: str) -> RunCard:
    """The line of a run that says only why there is no more to say."""
    return RunCard(
        name=name, state=state, env_ids=[], model=None, step=0, max_steps=None, reward=None, rewards=[],
        baseline=None, final=None, started_at=None, duration_s=None, problem=problem,
    )  # fmt: skip
