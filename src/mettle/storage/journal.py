"""The journal of a run: metrics by step, events, processes, and a few named facts.

It stands in the same database as the ledger, and every reader (run page, command line, summary) reads it there. What
holds for this moment only, such as who waits for whom, is in the beats of the processes (`mettle.processes.beats`).
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mettle.storage.database import Database


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once: a restart, an update refused, a stage reached."""

    event_id: int
    at: float
    source: str
    kind: str
    message: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A process of a run as its supervisor saw it: starting, running, restarting, done, failed or stopped."""

    name: str
    pid: int | None
    state: str
    restarts: int
    exit_code: int | None
    started_at: float | None
    updated_at: float


class Journal:
    """Reads and writes what is worth telling about a run."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def set_fact(self, key: str, value: Any) -> None:
        """Store a named JSON value, for instance `state` = running | finished | failed | stopped."""
        with self._database.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def fact(self, key: str, default: Any = None) -> Any:
        """A named value, or `default`."""
        text = self._database.value("SELECT value FROM meta WHERE key = ?", (key,))
        return default if text is None else json.loads(text)

    def record_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Store figures of a step; a step recorded again (a replay) replaces them. Non-finite values are left out."""
        now = self._clock()
        rows = [(name, step, float(v), now) for name, v in values.items() if abs(float(v)) < float("inf")]
        with self._database.transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", rows)

    def metric(self, name: str, *, after: int = -1) -> list[tuple[int, float]]:
        """(step, value) of one metric at the steps after `after`, in order."""
        sql = "SELECT step, value FROM metrics WHERE name = ? AND step > ? ORDER BY step"
        rows = self._database.rows(sql, (name, after))
        return [(row["step"], row["value"]) for row in rows]

    def metric_names(self) -> list[str]:
        """The metrics there are."""
        return [row["name"] for row in self._database.rows(f"{_NAMES} SELECT name FROM names WHERE name IS NOT NULL")]

    def latest(self) -> dict[str, tuple[int, float]]:
        """For each metric its newest (step, value). As quick in a long run as in a short one."""
        found = {}
        newest = "SELECT step, value FROM metrics WHERE name = ? ORDER BY step DESC LIMIT 1"
        for name in self.metric_names():
            row = self._database.row(newest, (name,))
            assert row is not None, "a metric has a value"
            found[name] = (row["step"], row["value"])
        return found

    def event(self, source: str, kind: str, message: str, **data: Any) -> None:
        """Record an event."""
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO events (at, source, kind, message, data) VALUES (?, ?, ?, ?, ?)",
                (self._clock(), source, kind, message, json.dumps(data, default=str)),
            )

    def events(self, *, after_id: int = 0, kind: str | None = None, limit: int = 1000) -> list[Event]:
        """Events after an id, oldest first."""
        rows = self._database.rows(
            "SELECT * FROM events WHERE event_id > ? AND (? IS NULL OR kind = ?) ORDER BY event_id LIMIT ?",
            (after_id, kind, kind, limit),
        )
        return [_event(row) for row in rows]

    def newest_event_id(self) -> int:
        """The id of the newest event; 0 before the first."""
        return int(self._database.value("SELECT max(event_id) FROM events") or 0)

    def record_process(self, name: str, state: str, *, pid: int | None, restarts: int, exit_code: int | None) -> None:
        """Store what a supervisor sees of a process."""
        now = self._clock()
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO processes VALUES (?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (name) DO UPDATE SET pid = excluded.pid,"
                " state = excluded.state, restarts = excluded.restarts, exit_code = excluded.exit_code,"
                " started_at = CASE WHEN excluded.state = 'starting' THEN excluded.started_at ELSE started_at END,"
                " updated_at = excluded.updated_at",
                (name, pid, state, restarts, exit_code, now, now),
            )

    def processes(self) -> list[ProcessRow]:
        """The processes of the run, by name."""
        return [ProcessRow(**dict(row)) for row in self._database.rows("SELECT * FROM processes ORDER BY name")]


_NAMES = """WITH RECURSIVE names (name) AS (
    SELECT min(name) FROM metrics
    UNION ALL SELECT (SELECT min(name) FROM metrics WHERE name > names.name) FROM names WHERE name IS NOT NULL
)"""
"""From one name to the next by the index: `DISTINCT` would look at every value."""


def _event(row: sqlite3.Row) -> Event:
    return Event(row["event_id"], row["at"], row["source"], row["kind"], row["message"], json.loads(row["data"]))
