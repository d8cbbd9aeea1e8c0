"""Evaluations in the store: what was planned, what is done, and how each ended.

Parts: `EvalPlan` (what is to be measured), `EvalRow` (an evaluation as it stands), `EvalStore` (writes), `read_evals`.
An evaluation is a row of `evals` in a run's database, its rollouts are rows of `rollouts` and blocks of the shards,
whether training asked for it or a person did. Invariants: the planned size is committed before the first rollout, and
a rollout when it ends, so that whatever happens, the store says how much of an evaluation is there; an evaluation that
is not finished is taken up where it stopped.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mettle.records.tasks import GroupRecord
from mettle.storage.database import Database
from mettle.storage.plain_json import json_text
from mettle.storage.rollouts import insert_rollouts
from mettle.storage.shards import ShardWriter

RUNNING, FINISHED, INTERRUPTED = "running", "finished", "interrupted"


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """What is to be measured. `kind` says for whom: eval, baseline, interim, final, probe, search, held_out or data.

    `step` is the policy version in a run that trains. `metadata` is the published description (`metadata.json`).
    """

    kind: str
    env_id: str
    num_tasks: int
    num_rollouts: int
    step: int = 0
    model: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalRow:
    """An evaluation as it stands: counts of what is done beside what was planned (None: not known).

    `state` is running, finished or interrupted; a killed process leaves it at running. `mean` and the interval are None
    before the end, and when no rollout had a reward.
    """

    eval_id: int
    kind: str
    step: int
    env_id: str
    version_min: int
    version_max: int
    num_tasks: int
    num_rollouts: int
    num_errors: int
    mean: float | None
    ci_low: float | None
    ci_high: float | None
    metrics: dict[str, float]
    created_at: float
    state: str = FINISHED
    model: str = ""
    planned_tasks: int | None = None
    planned_rollouts: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    updated_at: float | None = None

    @property
    def is_finished(self) -> bool:
        """True when all that was planned was run."""
        return self.state == FINISHED


class EvalStore:
    """Writes evaluations of one run directory."""

    def __init__(self, database: Database, shards: ShardWriter, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._shards = shards
        self._clock = clock
        self._plans: dict[int, EvalPlan] = {}

    def begin(self, plan: EvalPlan, eval_id: int | None = None) -> int:
        """Commit what is planned, for a new evaluation or (by its id) for one that goes on; the evaluation's id."""
        now = self._clock()
        planned = (plan.model, plan.num_tasks, plan.num_rollouts, json_text(plan.metadata), now)
        with self._database.transaction() as connection:
            if eval_id is None:
                cursor = connection.execute(
                    "INSERT INTO evals (kind, step, env_id, version_min, version_max, num_tasks, num_rollouts,"
                    " num_errors, metrics, created_at, state, model, planned_tasks, planned_rollouts, metadata,"
                    " updated_at) VALUES (?, ?, ?, -1, -1, 0, 0, 0, '{}', ?, ?, ?, ?, ?, ?, ?)",
                    (plan.kind, plan.step, plan.env_id, now, RUNNING, *planned),
                )
                assert cursor.lastrowid is not None, "an insert gives a row id"
                eval_id = cursor.lastrowid
            else:
                connection.execute(
                    "UPDATE evals SET state = ?, env_id = ?, model = ?, planned_tasks = ?, planned_rollouts = ?,"
                    " metadata = ?, updated_at = ? WHERE eval_id = ?",
                    (RUNNING, plan.env_id, *planned, eval_id),
                )
        self._plans[eval_id] = plan
        return eval_id

    def forget_rollouts(self, eval_id: int) -> None:
        """Let an evaluation be as it was before its first rollout."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM rollouts WHERE eval_id = ?", (eval_id,))

    def add(self, eval_id: int, groups: Sequence[GroupRecord]) -> None:
        """Write down rollouts that have ended: one append to a shard, one transaction.

        A rollout of an id that is there already replaces it. Raises: StorageError; nothing of `groups` counts then.
        """
        plan = self._plans[eval_id]
        with self._database.transaction() as connection:
            refs = self._shards.append_all(groups)
            insert_rollouts(
                connection, zip(groups, refs, strict=True), "eval", self._clock(), eval_id=eval_id, step=plan.step
            )

    def end(
        self,
        eval_id: int,
        *,
        state: str = FINISHED,
        mean: float | None = None,
        interval: tuple[float, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Say how an evaluation ended, with its figures; counts are taken from what is stored."""
        low, high = interval if interval is not None else (None, None)
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE evals SET state = ?, mean = ?, ci_low = ?, ci_high = ?, metrics = ?, updated_at = ?,"
                " metadata = coalesce(?, metadata), (num_tasks, num_rollouts, num_errors, version_min, version_max) ="
                f" ({COUNTS} WHERE eval_id = ?) WHERE eval_id = ?",
                (
                    state, mean, low, high, json_text(dict(metrics or {})), self._clock(),
                    None if metadata is None else json_text(metadata), eval_id, eval_id,
                ),
            )  # fmt: skip

    def interrupt(self, eval_id: int) -> None:
        """Say that an evaluation stopped before it was done."""
        self.end(eval_id, state=INTERRUPTED)


COUNTS = (
    "SELECT count(DISTINCT coalesce(example_id, uid)), count(*), count(*) - count(reward),"
    " coalesce(min(CASE WHEN version_min >= 0 THEN version_min END), -1), coalesce(max(version_max), -1) FROM rollouts"
)


def read_evals(database: Database, eval_id: int | None = None) -> list[EvalRow]:
    """Evaluations, oldest first, or the one of an id. One that is not finished is counted as it stands."""
    rows = database.rows("SELECT * FROM evals WHERE ? IS NULL OR eval_id = ? ORDER BY eval_id", (eval_id, eval_id))
    return [_eval_row(database, row) for row in rows]


def _eval_row(database: Database, row: sqlite3.Row) -> EvalRow:
    values = dict(row)
    values["metrics"] = json.loads(values["metrics"])
    values["metadata"] = json.loads(values.get("metadata") or "{}")
    if values.get("state", FINISHED) != FINISHED:
        counts = database.rows(f"{COUNTS} WHERE eval_id = ?", (values["eval_id"],))[0]
        names = ("num_tasks", "num_rollouts", "num_errors", "version_min", "version_max")
        values.update(zip(names, counts, strict=True))
    return EvalRow(**values)
