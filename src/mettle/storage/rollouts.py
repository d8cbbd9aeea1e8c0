"""Rows of rollouts: what lists, filters and figures need of a rollout without opening its block.

Parts: `insert_rollouts`, `RolloutRow` (one row), `rollout_rows`, `read_rollout` (the whole record, from its shard).
Invariant: a row names a block that was written before it; a rollout run again takes the place of the one that failed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mettle.errors import StorageError
from mettle.records.tasks import GroupRecord, RolloutRecord
from mettle.storage.database import Database
from mettle.storage.plain_json import json_bytes
from mettle.storage.shards import BlockRef, read_group

MAX_ERROR_CHARS = 2000
"""Of an error's message in a row; the block has all of it."""

COLUMNS = (
    "rollout_id", "kind", "env_id", "draw_id", "eval_id", "step", "position", "reward", "advantage", "metrics",
    "num_turns", "num_tokens", "version_min", "version_max", "stop_condition", "is_truncated", "error_kind", "error",
    "duration_s", "shard", "offset", "length", "created_at", "example_id", "uid", "error_type", "input_tokens",
    "output_tokens", "model_s", "env_s", "scoring_s", "excerpt",
)  # fmt: skip
INSERT = f"INSERT OR REPLACE INTO rollouts ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One rollout of an evaluation as SQL has it. `number` grows with each that ends."""

    number: int
    rollout_id: str
    position: int
    example_id: Any
    uid: str | None
    reward: float | None
    metrics: dict[str, float]
    num_turns: int
    num_tokens: int
    stop_condition: str | None
    is_truncated: bool
    error_kind: str | None
    error_type: str | None
    error: str | None
    duration_s: float
    model_s: float | None
    env_s: float | None
    scoring_s: float | None
    input_tokens: float | None
    output_tokens: float | None
    excerpt: str
    shard: str
    offset: int
    length: int

    @property
    def block(self) -> BlockRef:
        """Where its group's block lies."""
        return BlockRef(self.shard, self.offset, self.length)


def insert_rollouts(
    connection: sqlite3.Connection,
    groups: Iterable[tuple[GroupRecord, BlockRef]],
    kind: str,
    now: float,
    *,
    draw_id: int | None = None,
    eval_id: int | None = None,
    step: int | None = None,
) -> None:
    """Add the rows of written groups inside the caller's transaction."""
    rows = []
    for group, ref in groups:
        example = _json_of(group.draw.example_id)
        for place, rollout in enumerate(group.rollouts):
            rows.append(
                (
                    rollout.rollout_id, kind, group.draw.env_id, draw_id, eval_id, step,
                    place if rollout.position is None else rollout.position, rollout.reward, rollout.advantage,
                    json_bytes(rollout.metrics).decode(), rollout.num_turns, rollout.num_output_tokens,
                    *rollout.version_range, rollout.stop_condition, rollout.is_truncated, rollout.error_kind,
                    _clipped(rollout.error), rollout.duration_s, ref.shard, ref.offset, ref.length, now, example,
                    group.draw.uid or rollout.uid, rollout.error_type, *_tokens(rollout), rollout.model_s,
                    rollout.env_s, rollout.scoring_s, _storable(rollout.excerpt),
                )
            )  # fmt: skip
    connection.executemany(INSERT, rows)


def rollout_rows(database: Database, eval_id: int, after: int = 0) -> list[RolloutRow]:
    """The rollouts of an evaluation that ended after number `after`, in the order in which they did."""
    known = {row["name"] for row in database.rows("PRAGMA table_info(rollouts)")}
    # A ledger of an earlier release, open for reading, lacks the columns that came later.
    wanted = [name if name in known else f"NULL AS {name}" for name in _ROW_COLUMNS]
    rows = database.rows(
        f"SELECT rowid AS number, {', '.join(wanted)} FROM rollouts WHERE eval_id = ? AND rowid > ? ORDER BY rowid",
        (eval_id, after),
    )
    return [_rollout_row(row) for row in rows]


def read_rollout(folder: Path, row: RolloutRow) -> RolloutRecord:
    """The whole of a rollout. Raises: StorageError when its shard is missing, cut short or damaged."""
    group = read_group(folder, row.block)
    for record in group.rollouts:
        if record.rollout_id == row.rollout_id:
            return record
    raise StorageError(f"{folder / row.shard} has no rollout {row.rollout_id} at offset {row.offset}")


def _rollout_row(row: sqlite3.Row) -> RolloutRow:
    values = dict(row)
    values["example_id"] = None if values["example_id"] is None else json.loads(values["example_id"])
    values["metrics"] = json.loads(values["metrics"])
    values["is_truncated"] = bool(values["is_truncated"])
    values["excerpt"] = values["excerpt"] or ""
    return RolloutRow(**values)


_ROW_COLUMNS = [field.name for field in fields(RolloutRow) if field.name != "number"]


def _tokens(rollout: RolloutRecord) -> tuple[float | None, float | None]:
    usage = rollout.token_usage
    return (None, None) if usage is None else (usage.get("input_tokens"), usage.get("output_tokens"))


def _json_of(value: Any) -> str:
    return str(value) if type(value) is int else json_bytes(value).decode()


def _clipped(text: str | None) -> str | None:
    return None if text is None else _storable(text[:MAX_ERROR_CHARS])


def _storable(text: str) -> str:
    """Half a surrogate pair is no text to SQLite."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
