"""One run, read while it is written: a read-only ledger and the tables that follow it.

`refresh` asks SQLite first whether anything was committed since; when not, a poll costs one pragma.
Invariant: never writes; one thread at a time is inside.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mettle.errors import StorageError
from mettle.hub.metrics import MetricTable
from mettle.hub.provenance import read_config
from mettle.hub.steps import StepTable
from mettle.processes.beats import Beat, read_beats
from mettle.processes.child import process_state
from mettle.storage.database import Database
from mettle.storage.journal import Journal
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

QUIET_S = 20.0
"""A run whose processes are gone and that has written nothing for this long counts as interrupted."""


class RunReader:
    """A run directory open for reading."""

    def __init__(self, run_dir: RunDir, *, clock: Callable[[], float] = time.time) -> None:
        self.run_dir = run_dir
        self.clock = clock
        self.lock = threading.RLock()
        self.inode = inode_of(run_dir.ledger)
        self.ledger = Ledger(run_dir.ledger, is_read_only=True)
        self.steps = StepTable(self.database)
        self.metrics = MetricTable(self.database)
        self.hidden: list[tuple[str, str]] = []
        """What its logs are shown without, and what stands there instead."""
        self.title = run_dir.name
        """What people call it: its folder, unless somebody has given it a name."""
        self.drawn: dict[str, tuple[int, Any]] = {}
        """What pages draw of the whole run, and the change that it is of."""
        self.revision = -1
        self.change = 0
        self._data_version: int | None = None
        self._config: dict[str, Any] | None = None

    @property
    def database(self) -> Database:
        """The run's database."""
        return self.ledger.database

    @property
    def journal(self) -> Journal:
        """The run's diary."""
        return self.ledger.journal

    def close(self) -> None:
        """Close the database."""
        self.ledger.close()

    def refresh(self) -> int:
        """Follow what was written; the number that comes back changes when something was."""
        with self.lock:
            data_version = self.database.value("PRAGMA data_version")
            if data_version != self._data_version:
                self._follow()
                self._data_version = data_version
                self.change += 1
            return self.change

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, made anew when something was written since; for what takes long of a long run."""
        known = self.drawn.get(name)
        if known is None or known[0] != self.change:
            known = self.drawn[name] = self.change, make()
        return known[1]

    def _follow(self) -> None:
        restarts = int(self.database.value("SELECT coalesce(sum(restarts), 0) FROM processes"))
        if restarts != self.revision:
            # A restarted trainer replays steps and may write their figures again.
            self.revision = restarts
            self.steps.reset()
            self.metrics.reset()
        self.steps.refresh()
        self.metrics.refresh()

    def fact(self, *keys: str) -> Any:
        """The first of some named facts that is there."""
        return next((value for key in keys if (value := self.journal.fact(key)) is not None), None)

    @property
    def config(self) -> dict[str, Any]:
        """The run's resolved config; empty when it cannot be read."""
        if self._config is None:
            try:
                self._config = read_config(self.run_dir.path)
            except StorageError:
                self._config = {}
        return self._config

    def setting(self, *keys: str) -> Any:
        """The first of some dotted keys that the config has."""
        for key in keys:
            value: Any = self.config
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                return value
        return None

    def beats(self) -> dict[str, Beat]:
        """The newest signs of life of the run's processes; what a process that is gone has left is none."""
        beats = read_beats(self.run_dir.beats)
        return {name: beat for name, beat in beats.items() if beat.host or process_state(beat.pid)}

    @property
    def quiet_s(self) -> float:
        """Seconds since anything was written to the ledger."""
        ledger = str(self.run_dir.ledger)
        return self.clock() - max(written_ns(ledger), written_ns(f"{ledger}-wal")) / 1e9


def inode_of(path: Path) -> int:
    """The identity of a file; 0 when it is not there."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def written_ns(path: str) -> int:
    """When a file was last written, in nanoseconds; 0 when it is not there, or is the empty log that a reader of a
    database leaves. Without a `Path`: a list asks for thousands.
    """
    try:
        told = os.stat(path)
    except OSError:
        return 0
    return told.st_mtime_ns if told.st_size or not path.endswith("-wal") else 0
