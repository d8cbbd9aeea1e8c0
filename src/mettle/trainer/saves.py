"""Checkpoints of a training that has no ledger, from the newest of which it goes on after a kill.

Parts: `Saves` (one every so many seconds, the last kept) and `Unfinished` (the folder beside what is to be written,
with what was asked for). Invariant: a training that goes on is the one that was begun; one that was asked for
otherwise is refused, and never mixed into the first.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle.storage.checkpoints import Checkpoint, remove_checkpoints, write_checkpoint
from mettle.storage.files import storage_errors, write_json
from mettle.trainer.checkpoint import load_learner, newest_complete, save_learner
from mettle.trainer.learner import Learner

MAX_SHARE = 0.05
"""Of the time, at most, goes into writing checkpoints: a large one is written less often than was asked for."""


class Saves:
    """The checkpoints of a learner, one every `interval_s` seconds (0: each step), in `root`; the last one is kept."""

    def __init__(
        self, root: Path, learner: Learner, interval_s: float, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = root
        self._learner = learner
        self._interval_s = interval_s
        self._now = now
        self._due = now() + interval_s

    def restore(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Bring the learner to the newest complete checkpoint, and return it; None without one."""
        newest = newest_complete(self._root, warn)
        if newest is not None:
            load_learner(newest.trainer, self._learner)
        return newest

    def save_if_due(self, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint of the state after `step`, with `notes`, when the last one is old enough."""
        started = self._now()
        if started < self._due:
            return
        write_checkpoint(self._root, step, lambda folder: save_learner(folder, self._learner, step), dict(notes or {}))
        remove_checkpoints(self._root, keep_last=1)
        ended = self._now()
        self._due = ended + (max(self._interval_s, (ended - started) / MAX_SHARE) if self._interval_s else 0.0)

    def remove(self) -> None:
        """What was trained is in its place, and no checkpoint is needed any more."""
        shutil.rmtree(self._root, ignore_errors=True)


class Unfinished:
    """`.NAME.unfinished` beside the folder that a training is to write: its checkpoints, and what was asked for."""

    def __init__(self, to: Path) -> None:
        self.to = to
        self.folder = to.parent / f".{to.name}.unfinished"
        self.checkpoints = self.folder / "checkpoints"

    @contextmanager
    def begun(self, asked: Mapping[str, Any]) -> Iterator[None]:
        """Within the block this process alone trains towards the folder, and with what it was begun with.

        Raises: UserError when another process does, or when something else was asked for.
        """
        with storage_errors(self.folder, "writing"):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take(handle)
            self._agree(json.loads(json.dumps(asked)))
            yield
        finally:
            os.close(handle)

    def remove(self) -> None:
        """The folder is written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _take(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another process is training {self.to}; name another folder, or wait for it") from error

    def _agree(self, asked: Mapping[str, Any]) -> None:
        path = self.folder / "asked.json"
        if not path.exists():
            write_json(path, asked)
            return
        with storage_errors(path, "reading"):
            begun: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        other = [name for name in asked if begun.get(name) != asked[name]]
        if other:
            differing = ", ".join(f"{name} {begun.get(name)!r}, not {asked[name]!r}" for name in other)
            raise UserError(
                f"a fine-tuning to {self.to} was begun with {differing}: ask for the same again and it goes on, or"
                f" delete {self.folder} to begin anew"
            )
