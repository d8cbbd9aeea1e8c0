"""The service's database: operations with their outcomes, and the nouns they are about.

Accepting an operation and recording its outcome are one transaction each, so that a kill at any moment loses neither. A
model's row says which of its operations the snapshot on disk contains (`snapshot_seq`) and which have had their turn
(`last_seq`); those in between are kept with their bodies and run again after a crash, which gives the same state.
Parts: `Store`, in three layers: operations here, nouns in `Nouns`. Invariant: `last_seq` moves in the transaction that
records the outcome, and never back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from sqlite3 import Row
from typing import Final

from mettle.storage.database import Database
from mettle.trainer.service.nouns import Nouns
from mettle.trainer.service.records import Operation, Outcome, OwnerTokens
from mettle.trainer.service.schema import MIGRATIONS

_REPEATED: Final = ("forward_backward", "optim_step")
"""Operations that change a model's state and are repeated from the log."""


class Store(Nouns):
    """One database file of one service. Safe to use from several threads."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__(Database(path, MIGRATIONS), clock)

    def accept(self, operation: Operation, *, failed: str = "") -> Operation:
        """Take an operation; one that is known already is returned as it is. `failed`: it is refused with this line.

        The transaction is over when this returns: what is told to a client survives a crash.
        """
        with self.database.transaction() as connection:
            known = self.operation(operation.request_id)
            if known is not None:
                return known
            state, ended = ("failed", self.clock()) if failed else ("waiting", None)
            connection.execute(
                "INSERT INTO operations (request_id, kind, owner, session_id, model_id, seq_id, body, digest, state,"
                " category, error, created_at, ended_at, num_samples) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    operation.request_id, operation.kind, operation.owner, operation.session_id, operation.model_id,
                    operation.seq_id, b"" if failed else operation.body, operation.digest, state,
                    "user" if failed else "", failed, self.clock(), ended, operation.num_samples,
                ),
            )  # fmt: skip
            if operation.model_id:
                connection.execute(
                    "UPDATE models SET last_request_at = ? WHERE model_id = ?", (self.clock(), operation.model_id)
                )
        return operation

    def operation(self, request_id: str) -> Operation | None:
        row = self.database.row("SELECT * FROM operations WHERE request_id = ?", (request_id,))
        return None if row is None else _operation(row)

    def outcome(self, request_id: str) -> Outcome | None:
        """What came of an operation; None for an unknown one."""
        row = self.database.row(
            "SELECT state, kind, result, category, error FROM operations WHERE request_id = ?", (request_id,)
        )
        return None if row is None else Outcome(row["state"], row["kind"], row["result"], row["category"], row["error"])

    def settle(self, operation: Operation, outcome: Outcome) -> None:
        """Record an outcome, and that the operation has had its turn. Joins a transaction that is open."""
        keeps_body = outcome.state == "done" and operation.kind in _REPEATED
        with self.database.transaction() as connection:
            done = connection.execute(
                "UPDATE operations SET state = ?, result = ?, category = ?, error = ?, ended_at = ?,"
                " body = CASE WHEN ? THEN body ELSE x'' END WHERE request_id = ? AND state = 'waiting'",
                (
                    outcome.state, outcome.result, outcome.category, outcome.error, self.clock(), keeps_body,
                    operation.request_id,
                ),
            )  # fmt: skip
            if outcome.num_tokens and done.rowcount:
                connection.execute(
                    "INSERT INTO usage (owner, since, num_tokens) VALUES (?, ?, ?)"
                    " ON CONFLICT (owner) DO UPDATE SET num_tokens = num_tokens + excluded.num_tokens",
                    (operation.owner, self.clock(), outcome.num_tokens),
                )
            if operation.model_id:
                connection.execute(
                    "UPDATE models SET last_seq = max(last_seq, ?) WHERE model_id = ?",
                    (operation.seq_id, operation.model_id),
                )

    def usage(self) -> list[OwnerTokens]:
        """What each owner's operations have taken."""
        rows = self.database.rows("SELECT owner, since, num_tokens FROM usage ORDER BY owner")
        return [OwnerTokens(row["owner"], row["since"], row["num_tokens"]) for row in rows]

    def give_up(self, model_id: str, numbers: Sequence[int], error: str) -> list[str]:
        """Fail the operations of a model that waited for one that did not come; their request ids."""
        with self.database.transaction() as connection:
            found = [
                row["request_id"]
                for number in numbers
                for row in connection.execute(
                    "SELECT request_id FROM operations WHERE model_id = ? AND seq_id = ? AND state = 'waiting'",
                    (model_id, number),
                ).fetchall()
            ]
            connection.executemany(
                "UPDATE operations SET state = 'failed', category = 'user', error = ?, ended_at = ?, body = x''"
                " WHERE request_id = ?",
                [(error, self.clock(), request_id) for request_id in found],
            )
            connection.execute(
                "UPDATE models SET last_seq = max(last_seq, ?) WHERE model_id = ?", (max(numbers), model_id)
            )
        return found

    def waiting(self) -> list[Operation]:
        """All operations without an outcome, in the order in which they came."""
        rows = self.database.rows("SELECT * FROM operations WHERE state = 'waiting' ORDER BY rowid")
        return [_operation(row) for row in rows]

    def to_repeat(self, model_id: str, after: int) -> list[Operation]:
        """What has changed a model's state since its snapshot, in order."""
        rows = self.database.rows(
            "SELECT * FROM operations WHERE model_id = ? AND seq_id > ? AND state = 'done'"
            " AND kind IN ('forward_backward', 'optim_step') ORDER BY seq_id",
            (model_id, after),
        )
        return [_operation(row) for row in rows]

    def record_snapshot(self, model_id: str, snapshot: str, seq_id: int) -> None:
        """The state on disk contains everything up to `seq_id`; the bodies of that are not needed any more."""
        with self.database.transaction() as connection:
            connection.execute(
                "UPDATE models SET snapshot = ?, snapshot_seq = ? WHERE model_id = ?", (snapshot, seq_id, model_id)
            )
            connection.execute(
                "UPDATE operations SET body = x'' WHERE model_id = ? AND seq_id <= ? AND state != 'waiting'",
                (model_id, seq_id),
            )

    def pending(self, owner: str) -> tuple[int, int]:
        """How many operations of an owner wait, and how many bytes they hold."""
        row = self.database.row(
            "SELECT count(*), coalesce(sum(length(body)), 0) FROM operations WHERE owner = ? AND state = 'waiting'",
            (owner,),
        )
        assert row is not None, "a count always answers"
        return int(row[0]), int(row[1])

    def cancel(self, request_id: str, error: str) -> bool:
        """Cancel a sample that waits; True when there was one."""
        with self.database.transaction() as connection:
            done = connection.execute(
                "UPDATE operations SET state = 'cancelled', category = 'user', error = ?, ended_at = ?, body = x''"
                " WHERE request_id = ? AND state = 'waiting' AND kind = 'sample'",
                (error, self.clock(), request_id),
            )
            return done.rowcount > 0

    def forget_results(self, ended_before: float) -> int:
        """Drop outcomes that nobody can ask for any more: of sessions that ended before a time."""
        with self.database.transaction() as connection:
            done = connection.execute(
                "DELETE FROM operations WHERE state != 'waiting' AND length(body) = 0 AND ended_at < ?"
                " AND session_id IN (SELECT session_id FROM sessions WHERE coalesce(ended_at, last_seen_at) < ?)",
                (ended_before, ended_before),
            )
            return done.rowcount


def _operation(row: Row) -> Operation:
    return Operation(
        row["request_id"], row["kind"], row["owner"], row["session_id"], row["model_id"], row["seq_id"], row["body"],
        row["digest"], row["created_at"], row["state"], row["num_samples"],
    )  # fmt: skip
