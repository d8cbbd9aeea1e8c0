"""The ledger: what became of each task, batch and policy version of a run.

Parts: task draws and their transitions, scored groups, shipped and trained batches, published and acknowledged
versions. Metrics and events are in `journal`, evaluations in `evals`. Invariants: a task draw changes state only
along `TRANSITIONS`; a task belongs to at most one batch; a batch is trained at most once in the lineage of the weights
(a replay after a crash rebuilds the same version from the same bytes, and is counted in `trainings`).
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.errors import StorageError
from mettle.records.tasks import DropReason, GroupRecord, TaskDraw, TaskState
from mettle.records.versions import CanaryCheck, WeightVersion
from mettle.storage.database import Database
from mettle.storage.journal import Journal
from mettle.storage.rollouts import insert_rollouts
from mettle.storage.schema import MIGRATIONS
from mettle.storage.shards import BlockRef

TRANSITIONS: dict[TaskState, frozenset[TaskState]] = {
    TaskState.PENDING: frozenset({TaskState.IN_FLIGHT, TaskState.DROPPED}),
    TaskState.IN_FLIGHT: frozenset({TaskState.PENDING, TaskState.SCORED, TaskState.DROPPED}),
    TaskState.SCORED: frozenset({TaskState.SHIPPED, TaskState.DROPPED}),
    TaskState.SHIPPED: frozenset({TaskState.TRAINED}),
    TaskState.TRAINED: frozenset(),
    TaskState.DROPPED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A shipped batch as the ledger knows it."""

    step: int
    digest: str
    num_sequences: int
    num_tokens: int
    staleness_mean: float
    staleness_max: int
    orchestrator_state: dict[str, Any]
    shipped_at: float
    trained_at: float | None
    weights_digest: str | None
    trainings: int


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A published version and, once every engine has taken it, the acknowledgement."""

    weights: WeightVersion
    published_at: float
    acked_at: float | None
    canary: CanaryCheck | None
    update_ms: float | None


class Ledger:
    """The accounts of one run. Open one per process; every method is one transaction."""

    def __init__(
        self,
        path: Path,
        *,
        is_read_only: bool = False,
        is_blocking: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.database = Database(path, MIGRATIONS, is_read_only=is_read_only, is_blocking=is_blocking)
        self.journal = Journal(self.database, clock=clock)
        self._clock = clock

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    # Tasks

    def draw_tasks(self, draws: Iterable[tuple[str, str, int, int]]) -> list[TaskDraw]:
        """Add draws (env_id, uid, epoch, example_id) as pending; drawing the same row twice in an epoch is an error."""
        added: list[TaskDraw] = []
        with self.database.transaction() as connection:
            for env_id, uid, epoch, example_id in draws:
                cursor = connection.execute(
                    "INSERT INTO tasks (env_id, uid, epoch, example_id, updated_at) VALUES (?, ?, ?, ?, ?)",
                    (env_id, uid, epoch, example_id, self._clock()),
                )
                assert cursor.lastrowid is not None, "an insert gives a row id"
                added.append(TaskDraw(cursor.lastrowid, env_id, uid, epoch, example_id))
        return added

    def tasks_in(self, state: TaskState) -> list[TaskDraw]:
        """Task draws in a state, oldest first."""
        rows = self.database.rows(
            "SELECT draw_id, env_id, uid, epoch, example_id FROM tasks WHERE state = ? ORDER BY draw_id", (state.value,)
        )
        return [TaskDraw(*row) for row in rows]

    def dispatch(self, draw_id: int) -> None:
        """pending -> in flight."""
        with self.database.transaction() as connection:
            self._move(connection, draw_id, TaskState.IN_FLIGHT)
            connection.execute("UPDATE tasks SET attempts = attempts + 1 WHERE draw_id = ?", (draw_id,))

    def attempts(self, draw_id: int) -> int:
        """How often a task has been dispatched."""
        return int(self.database.value("SELECT attempts FROM tasks WHERE draw_id = ?", (draw_id,)) or 0)

    def put_back(self, draw_ids: Sequence[int]) -> None:
        """in flight -> pending: the group came to nothing and will be tried again."""
        with self.database.transaction() as connection:
            for draw_id in draw_ids:
                self._move(connection, draw_id, TaskState.PENDING)

    def drop(self, draw_id: int, reason: DropReason) -> None:
        """Any untrained, unshipped state -> dropped."""
        with self.database.transaction() as connection:
            self._move(connection, draw_id, TaskState.DROPPED, reason=reason.value)

    def record_scored(self, group: GroupRecord, ref: BlockRef, *, drop: DropReason | None = None) -> None:
        """in flight -> scored, with the group's rollouts; `drop` sends it on to dropped in the same transaction.

        The block at `ref` must be written before.
        """
        rewards = group.rewards
        with self.database.transaction() as connection:
            self._move(connection, group.draw.draw_id, TaskState.SCORED)
            connection.execute(
                "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    group.draw.draw_id, group.version_at_start, ref.shard, ref.offset, ref.length, len(group.rollouts),
                    *_mean_and_spread(rewards), self._clock(),
                ),
            )  # fmt: skip
            insert_rollouts(connection, [(group, ref)], "train", self._clock(), draw_id=group.draw.draw_id)
            if drop is not None:
                self._move(connection, group.draw.draw_id, TaskState.DROPPED, reason=drop.value)

    def past_draws(self, env_id: str) -> list[tuple[int, float | None]]:
        """(example_id, mean reward of its group or None) of each draw of an environment, oldest first."""
        rows = self.database.rows(
            "SELECT t.example_id, g.reward_mean FROM tasks t LEFT JOIN groups g USING (draw_id)"
            " WHERE t.env_id = ? ORDER BY t.draw_id",
            (env_id,),
        )
        return [(row["example_id"], row["reward_mean"]) for row in rows]

    def scored_groups(self) -> list[tuple[int, BlockRef]]:
        """(draw_id, block) of the groups that wait to be shipped, oldest first."""
        rows = self.database.rows(
            "SELECT g.draw_id, g.shard, g.offset, g.length FROM groups g JOIN tasks t USING (draw_id)"
            " WHERE t.state = 'scored' ORDER BY g.created_at, g.draw_id"
        )
        return [(row["draw_id"], BlockRef(row["shard"], row["offset"], row["length"])) for row in rows]

    def task_counts(self) -> dict[str, int]:
        """Number of task draws by state; a dropped one counts under `dropped:<reason>`."""
        rows = self.database.rows(
            "SELECT CASE WHEN state = 'dropped' THEN 'dropped:' || reason ELSE state END AS name, count(*) AS number"
            " FROM tasks GROUP BY name ORDER BY name"
        )
        return {row["name"]: row["number"] for row in rows}

    # Batches

    def ship(
        self,
        step: int,
        digest: str,
        draw_ids: Sequence[int],
        *,
        num_sequences: int,
        num_tokens: int,
        staleness: tuple[float, int],
        orchestrator_state: dict[str, Any],
    ) -> None:
        """Make a written batch the one of `step`: its tasks go scored -> shipped. One batch a step, for ever."""
        with self.database.transaction() as connection:
            if connection.execute("SELECT 1 FROM batches WHERE step = ?", (step,)).fetchone():
                raise StorageError(f"step {step} already has a batch; a batch is shipped once")
            connection.execute(
                "INSERT INTO batches (step, digest, num_sequences, num_tokens, staleness_mean, staleness_max,"
                " orchestrator_state, shipped_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (step, digest, num_sequences, num_tokens, *staleness, json.dumps(orchestrator_state), self._clock()),
            )
            for draw_id in draw_ids:
                self._move(connection, draw_id, TaskState.SHIPPED, step=step)
                connection.execute("UPDATE rollouts SET step = ? WHERE draw_id = ?", (step, draw_id))

    def batch(self, step: int) -> BatchRow | None:
        """The batch of `step`, or None while it has not been shipped."""
        row = self.database.row("SELECT * FROM batches WHERE step = ?", (step,))
        return None if row is None else _batch_row(row)

    def last_batch(self) -> BatchRow | None:
        """The newest shipped batch."""
        row = self.database.row("SELECT * FROM batches ORDER BY step DESC LIMIT 1")
        return None if row is None else _batch_row(row)

    def batches(self, *, after: int = 0) -> list[BatchRow]:
        """The batches of the steps after `after`, in order."""
        rows = self.database.rows("SELECT * FROM batches WHERE step > ? ORDER BY step", (after,))
        return [_batch_row(row) for row in rows]

    def batch_digests(self, after: int, last: int) -> list[str]:
        """The digests of the batches of the steps after `after`, up to `last`."""
        sql = "SELECT digest FROM batches WHERE step > ? AND step <= ? ORDER BY step"
        return [row["digest"] for row in self.database.rows(sql, (after, last))]

    def groups_of(self, step: int) -> list[tuple[int, BlockRef]]:
        """(draw_id, block) of the groups in the batch of `step`, in the order in which they stand there."""
        rows = self.database.rows(
            "SELECT g.draw_id, g.shard, g.offset, g.length FROM tasks t JOIN groups g USING (draw_id)"
            " WHERE t.step = ? ORDER BY g.draw_id",
            (step,),
        )
        return [(row["draw_id"], BlockRef(row["shard"], row["offset"], row["length"])) for row in rows]

    def record_trained(self, step: int, weights: WeightVersion, draw_ids: Sequence[int]) -> bool:
        """Commit that step `step` has made `weights`: its tasks go shipped -> trained and the version is published.

        `draw_ids` are those in the batch that was trained, as read from its file. Called after the folder of the
        weights is visible. On a replay the tasks are trained already; then only the count of trainings grows. Returns
        False if a replay made other weights than the first time.
        """
        now = self._clock()
        with self.database.transaction() as connection:
            row = connection.execute("SELECT weights_digest, trainings FROM batches WHERE step = ?", (step,)).fetchone()
            if row is None:
                raise StorageError(f"step {step} was trained but never shipped")
            if row["trainings"] == 0:
                for (draw_id,) in connection.execute("SELECT draw_id FROM tasks WHERE step = ?", (step,)).fetchall():
                    self._move(connection, draw_id, TaskState.TRAINED)
            connection.execute(
                "UPDATE batches SET trained_at = ?, weights_digest = ?, trainings = trainings + 1 WHERE step = ?",
                (now, weights.digest, step),
            )
            connection.executemany(
                "INSERT OR REPLACE INTO trained VALUES (?, ?, ?)",
                [(draw_id, step, number) for draw_id, number in Counter(draw_ids).items()],
            )
            self._publish(connection, weights)
        return row["weights_digest"] in (None, weights.digest)

    def trained_more_than_once(self) -> int | None:
        """Task draws that the trained batches hold more than once; None where some were trained before this was noted.

        A step that a restart trained again, from the weights before it, counts once.
        """
        if self.database.value("SELECT 1 FROM sqlite_master WHERE name = 'trained'") is None:
            return None  # of an earlier release, open for reading
        times = "SELECT sum(times) AS times FROM trained GROUP BY draw_id"
        num_noted, num_twice = self.database.rows(f"SELECT count(*), coalesce(sum(times > 1), 0) FROM ({times})")[0]
        num_trained = self.database.value("SELECT count(*) FROM tasks WHERE state = 'trained'")
        return int(num_twice) if num_noted >= num_trained else None

    # Versions

    def publish(self, weights: WeightVersion) -> None:
        """Record a version that no step made (v0, or one published again from a checkpoint)."""
        with self.database.transaction() as connection:
            self._publish(connection, weights)

    def newest_version(self) -> VersionRow | None:
        """The newest published version."""
        row = self.database.row("SELECT * FROM versions ORDER BY version DESC LIMIT 1")
        return None if row is None else _version_row(row)

    def version(self, version: int) -> VersionRow | None:
        """One published version."""
        row = self.database.row("SELECT * FROM versions WHERE version = ?", (version,))
        return None if row is None else _version_row(row)

    def versions(self) -> list[VersionRow]:
        """All published versions in order."""
        return [_version_row(row) for row in self.database.rows("SELECT * FROM versions ORDER BY version")]

    def newest_acknowledged(self) -> int | None:
        """The newest version that every engine has taken."""
        sql = "SELECT version FROM versions WHERE acked_at IS NOT NULL AND acked_digest = digest"
        found: int | None = self.database.value(f"{sql} ORDER BY version DESC LIMIT 1")
        return found

    def acknowledge(self, weights: WeightVersion, canary: CanaryCheck | None, update_ms: float) -> None:
        """Every engine serves these weights."""
        with self.database.transaction() as connection:
            connection.execute(
                "UPDATE versions SET acked_at = ?, acked_digest = ?, canary_mean = ?, canary_max = ?, update_ms = ?"
                " WHERE version = ?",
                (
                    self._clock(), weights.digest, canary and canary.mean_abs_diff, canary and canary.max_abs_diff,
                    update_ms, weights.version,
                ),
            )  # fmt: skip

    def move_versions(self, folder: Path) -> None:
        """Say that the versions lie in `folder` now."""
        with self.database.transaction() as connection:
            connection.execute("UPDATE versions SET path = ? || version", (f"{folder}/v",))

    # Inside

    def _move(
        self,
        connection: sqlite3.Connection,
        draw_id: int,
        new: TaskState,
        *,
        reason: str | None = None,
        step: int | None = None,
    ) -> None:
        row = connection.execute("SELECT state FROM tasks WHERE draw_id = ?", (draw_id,)).fetchone()
        if row is None:
            raise StorageError(f"task draw {draw_id} is not in the ledger")
        old = TaskState(row["state"])
        if new not in TRANSITIONS[old]:
            raise StorageError(f"task draw {draw_id} is {old.value} and cannot become {new.value}")
        connection.execute(
            "UPDATE tasks SET state = ?, reason = ?, step = coalesce(?, step), updated_at = ? WHERE draw_id = ?",
            (new.value, reason, step, self._clock(), draw_id),
        )

    def _publish(self, connection: sqlite3.Connection, weights: WeightVersion) -> None:
        connection.execute(
            "INSERT INTO versions (version, path, digest, kind, published_at) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (version) DO UPDATE SET path = excluded.path, digest = excluded.digest,"
            " kind = excluded.kind, published_at = excluded.published_at",
            (weights.version, weights.path, weights.digest, weights.kind, self._clock()),
        )


def _batch_row(row: sqlite3.Row) -> BatchRow:
    values = dict(row)
    values["orchestrator_state"] = json.loads(values["orchestrator_state"])
    return BatchRow(**values)


def _mean_and_spread(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Of a group. `statistics.pstdev` calculates with fractions, and takes forty times as long."""
    if not rewards:
        return None, None
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))


def _version_row(row: sqlite3.Row) -> VersionRow:
    weights = WeightVersion(row["version"], row["path"], row["digest"], row["kind"])
    is_acked = row["acked_at"] is not None and row["acked_digest"] == row["digest"]
    canary = None
    if is_acked and row["canary_mean"] is not None:
        canary = CanaryCheck(row["version"], row["canary_mean"], row["canary_max"], 0)
    return VersionRow(weights, row["published_at"], row["acked_at"] if is_acked else None, canary, row["update_ms"])
