"""Sessions, models, samplers and checkpoints in the database: what `Store` knows beside operations.

Invariant: whatever is asked for by somebody is looked for among what is theirs, so that another's is not there at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from sqlite3 import Row
from typing import Any

from mettle.storage.database import Database
from mettle.trainer.service.records import AdapterSpec, ClientSession, Sampler, SavedWeights, TrainedModel


class Nouns:
    """The tables of nouns."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self.database, self.clock = database, clock

    def add_session(self, session_id: str, owner: str, metadata: Mapping[str, Any]) -> None:
        now = self.clock()
        with self.database.transaction() as connection:
            connection.execute(
                "INSERT INTO sessions VALUES (?,?,?,?,NULL,?)", (session_id, owner, now, now, json.dumps(metadata))
            )

    def session(self, session_id: str, owner: str) -> ClientSession | None:
        row = self.database.row("SELECT * FROM sessions WHERE session_id = ? AND owner = ?", (session_id, owner))
        return None if row is None else _session(row)

    def sessions(self, owner: str) -> list[ClientSession]:
        """Newest first."""
        rows = self.database.rows("SELECT * FROM sessions WHERE owner = ? ORDER BY created_at DESC", (owner,))
        return [_session(row) for row in rows]

    def see_session(self, session_id: str) -> None:
        """It is alive: one that had ended goes on."""
        with self.database.transaction() as connection:
            connection.execute(
                "UPDATE sessions SET last_seen_at = ?, ended_at = NULL WHERE session_id = ?", (self.clock(), session_id)
            )

    def end_session(self, session_id: str) -> None:
        with self.database.transaction() as connection:
            connection.execute("UPDATE sessions SET ended_at = ? WHERE session_id = ?", (self.clock(), session_id))

    def silent_sessions(self, seen_before: float) -> list[str]:
        """Those that have not ended and were not heard of since."""
        rows = self.database.rows(
            "SELECT session_id FROM sessions WHERE ended_at IS NULL AND last_seen_at < ?", (seen_before,)
        )
        return [row[0] for row in rows]

    def add_model(self, model: TrainedModel) -> None:
        """Joins a transaction that is open; a model that is there stays as it is."""
        with self.database.transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO models VALUES (?,?,?,?,?,?,?,?,?,?,?)",
                (
                    model.model_id, model.session_id, model.owner, model.base_model, json.dumps(asdict(model.spec)),
                    json.dumps(dict(model.metadata)), model.created_at, model.last_request_at, model.last_seq,
                    model.snapshot_seq, model.snapshot,
                ),
            )  # fmt: skip

    def model(self, model_id: str, owner: str | None = None) -> TrainedModel | None:
        """A model; with `owner`, only one of theirs."""
        row = self.database.row("SELECT * FROM models WHERE model_id = ?", (model_id,))
        return None if row is None or owner not in (None, row["owner"]) else _model(row)

    def models(self, owner: str) -> list[TrainedModel]:
        """Newest first."""
        rows = self.database.rows("SELECT * FROM models WHERE owner = ? ORDER BY created_at DESC", (owner,))
        return [_model(row) for row in rows]

    def num_living_models(self, owner: str) -> int:
        """Models of theirs in sessions that have not ended."""
        query = (
            "SELECT count(*) FROM models JOIN sessions USING (session_id) WHERE models.owner = ? AND ended_at IS NULL"
        )
        return int(self.database.value(query, (owner,)))

    def snapshots(self) -> set[str]:
        """The folders of all models' states."""
        return {row[0] for row in self.database.rows("SELECT snapshot FROM models") if row[0]}

    def models_of_session(self, session_id: str) -> list[str]:
        rows = self.database.rows("SELECT model_id FROM models WHERE session_id = ?", (session_id,))
        return [row[0] for row in rows]

    def set_model(self, model_id: str, spec: AdapterSpec) -> None:
        """A model became another adapter: it was loaded from a checkpoint."""
        with self.database.transaction() as connection:
            connection.execute("UPDATE models SET spec = ? WHERE model_id = ?", (json.dumps(asdict(spec)), model_id))

    def put_sampler(self, sampler: Sampler) -> None:
        """Add a sampler; one that is there gets the new weights and the next version."""
        with self.database.transaction() as connection:
            connection.execute(
                "INSERT INTO samplers VALUES (?,?,?,?,?,?,?,?,0) ON CONFLICT (sampler_id) DO UPDATE SET"
                " folder = excluded.folder, model_path = excluded.model_path, version = samplers.version + 1",
                (
                    sampler.sampler_id, sampler.session_id, sampler.owner, sampler.base_model, sampler.model_path,
                    sampler.folder, sampler.created_at, sampler.version,
                ),
            )  # fmt: skip

    def sampler(self, sampler_id: str, owner: str) -> Sampler | None:
        row = self.database.row("SELECT * FROM samplers WHERE sampler_id = ? AND owner = ?", (sampler_id, owner))
        return None if row is None else _sampler(row)

    def samplers_of_session(self, session_id: str) -> list[Sampler]:
        rows = self.database.rows("SELECT * FROM samplers WHERE session_id = ? ORDER BY rowid", (session_id,))
        return [_sampler(row) for row in rows]

    def join_sampler(self, sampler_id: str) -> int:
        """A number for one more client of a sampler: 1, 2, ..."""
        with self.database.transaction() as connection:
            connection.execute("UPDATE samplers SET num_joined = num_joined + 1 WHERE sampler_id = ?", (sampler_id,))
            return int(self.database.value("SELECT num_joined FROM samplers WHERE sampler_id = ?", (sampler_id,)))

    def put_checkpoint(self, checkpoint: SavedWeights) -> None:
        """Add a checkpoint, in place of one of the same path."""
        with self.database.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO checkpoints VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    checkpoint.path, checkpoint.model_id, checkpoint.owner, checkpoint.kind, checkpoint.name,
                    checkpoint.folder, checkpoint.num_bytes, checkpoint.created_at, checkpoint.expires_at,
                    checkpoint.is_public, json.dumps(dict(checkpoint.metadata)),
                    json.dumps(asdict(checkpoint.spec)) if checkpoint.spec else "null", checkpoint.base_model,
                ),
            )  # fmt: skip

    def checkpoint(self, path: str, owner: str) -> SavedWeights | None:
        """A checkpoint of theirs, or one that is public."""
        row = self.database.row(
            "SELECT * FROM checkpoints WHERE path = ? AND (owner = ? OR is_public)"
            " AND (expires_at IS NULL OR expires_at >= ?)",
            (path, owner, self.clock()),
        )  # fmt: skip
        return None if row is None else _checkpoint(row)

    def checkpoints(self, owner: str, model_id: str | None = None) -> list[SavedWeights]:
        """Newest first."""
        rows = self.database.rows(
            "SELECT * FROM checkpoints WHERE owner = ? AND (? IS NULL OR model_id = ?) AND (expires_at IS NULL OR"
            " expires_at >= ?) ORDER BY created_at DESC, rowid DESC",
            (owner, model_id, model_id, self.clock()),
        )
        return [_checkpoint(row) for row in rows]

    def expired_checkpoints(self) -> list[SavedWeights]:
        rows = self.database.rows("SELECT * FROM checkpoints WHERE expires_at < ?", (self.clock(),))
        return [_checkpoint(row) for row in rows]

    def change_checkpoint(self, path: str, *, expires_at: float | None, is_public: bool) -> None:
        with self.database.transaction() as connection:
            connection.execute(
                "UPDATE checkpoints SET expires_at = ?, is_public = ? WHERE path = ?", (expires_at, is_public, path)
            )

    def remove_checkpoint(self, path: str) -> None:
        with self.database.transaction() as connection:
            connection.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def stored_bytes(self, owner: str) -> int:
        """What an owner's checkpoints take."""
        query = "SELECT coalesce(sum(num_bytes), 0) FROM checkpoints WHERE owner = ?"
        return int(self.database.value(query, (owner,)))

    def folders_in_use(self) -> set[str]:
        """Folders of weights that a checkpoint or a sampler of a living session needs."""
        rows = self.database.rows(
            "SELECT folder FROM checkpoints UNION SELECT samplers.folder FROM samplers JOIN sessions USING (session_id)"
            " WHERE sessions.ended_at IS NULL"
        )
        return {row[0] for row in rows if row[0]}


def _session(row: Row) -> ClientSession:
    return ClientSession(
        row["session_id"], row["owner"], row["created_at"], row["last_seen_at"], row["ended_at"],
        json.loads(row["metadata"]),
    )  # fmt: skip


def _model(row: Row) -> TrainedModel:
    return TrainedModel(
        row["model_id"], row["session_id"], row["owner"], row["base_model"], AdapterSpec(**json.loads(row["spec"])),
        json.loads(row["metadata"]), row["created_at"], row["last_request_at"], row["last_seq"], row["snapshot_seq"],
        row["snapshot"],
    )  # fmt: skip


def _sampler(row: Row) -> Sampler:
    return Sampler(
        row["sampler_id"], row["session_id"], row["owner"], row["base_model"], row["model_path"], row["folder"],
        row["created_at"], row["version"],
    )  # fmt: skip


def _checkpoint(row: Row) -> SavedWeights:
    spec = json.loads(row["spec"])
    return SavedWeights(
        row["path"], row["model_id"], row["owner"], row["kind"], row["name"], row["folder"], row["num_bytes"],
        row["created_at"], row["expires_at"], bool(row["is_public"]), json.loads(row["metadata"]),
        AdapterSpec(**spec) if spec else None, row["base_model"],
    )  # fmt: skip
