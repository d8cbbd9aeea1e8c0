"""The runs there are: a folder of run directories, or one run; and the evaluations of the workspace.

Keeps the readers of the runs that were looked at last open, and what the list shows of the others for as long as their
files do not change.
Invariant: a name from outside is only ever compared with the names that are there, never joined to a path.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from mettle.errors import MettleError, StorageError, UserError
from mettle.hub.evaluations import EvaluationCatalog
from mettle.hub.models import RunCard
from mettle.hub.reader import RunReader, inode_of, modified_at
from mettle.hub.summary import LIVE_STATES, card_of, summarise
from mettle.storage.run_dir import RunDir

MAX_OPEN = 8


class RunCatalog:
    """Finds and opens runs under `root`."""

    def __init__(self, root: Path, *, workspace: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.root = root.resolve()
        self.evaluations = EvaluationCatalog(workspace, self._folders)
        self._clock = clock
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, RunReader] = OrderedDict()
        self._cards: dict[str, tuple[tuple[float, float, int], RunCard]] = {}

    def names(self) -> list[str]:
        """The runs there are, those written last first."""
        return [path.name for path in sorted(self._folders(), key=self._written_at, reverse=True)]

    def open(self, name: str) -> RunReader:
        """The reader of a run.

        Raises: UserError when there is no such run, StorageError when its ledger cannot be read.
        """
        path = next((folder for folder in self._folders() if folder.name == name), None)
        if path is None:
            raise UserError(f"There is no run named {name!r} here.")
        run_dir = RunDir(path)
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
        cards = [self._card(name) for name in self.names() if not self.is_evaluation(self._path(name))]
        return _by_state_and_start(cards)

    def page_of_cards(self, number: int, size: int) -> tuple[list[RunCard], int]:
        """A page of that list, those written last on the first, and how many runs there are in all.

        Only the runs of the page are opened; what goes on is written to, and stands on the first.
        """
        names = [name for name in self.names() if not self.is_evaluation(self._path(name))]
        cards = [self._card(name) for name in names[(number - 1) * size : number * size]]
        return _by_state_and_start(cards), len(names)

    def _card(self, name: str) -> RunCard:
        ledger = RunDir(self._path(name)).ledger
        stamp = (modified_at(ledger), modified_at(ledger.with_name("run.db-wal")), inode_of(ledger))
        kept = self._cards.get(name)
        if kept is not None and kept[0] == stamp and kept[1].state not in LIVE_STATES:
            return kept[1]
        try:
            reader = self.open(name)
            with reader.lock:
                card = card_of(summarise(reader), reader)
        except MettleError as error:
            card = unreadable(name, "unreadable" if ledger.exists() else "new", str(error))
        self._cards[name] = (stamp, card)
        return card

    def is_evaluation(self, folder: Path) -> bool:
        """True for a run directory without a trainer, which stands among the evaluations."""
        return self.evaluations.is_own(folder)

    def _path(self, name: str) -> Path:
        return self.root if self._is_run(self.root) else self.root / name

    def _folders(self) -> list[Path]:
        if self._is_run(self.root):
            return [self.root]
        try:
            children = [p for p in self.root.iterdir() if not p.name.startswith(".") and p.is_dir()]
        except OSError:
            return []
        return [p for p in children if self._is_run(p)]

    @staticmethod
    def _is_run(path: Path) -> bool:
        return any((path / name).exists() for name in ("run.db", "run.toml", "endpoints"))

    @staticmethod
    def _written_at(path: Path) -> float:
        return max(modified_at(path / "run.db"), modified_at(path / "run.db-wal"), modified_at(path))


def _by_state_and_start(cards: list[RunCard]) -> list[RunCard]:
    return sorted(cards, key=lambda card: (card.state in LIVE_STATES, card.started_at or 0.0), reverse=True)


def unreadable(name: str, state: str, problem: str) -> RunCard:
    """The line of a run that says only why there is no more to say."""
    return RunCard(
        name=name, state=state, env_ids=[], model=None, step=0, max_steps=None, reward=None, rewards=[],
        baseline=None, final=None, started_at=None, duration_s=None, problem=problem,
    )  # fmt: skip
