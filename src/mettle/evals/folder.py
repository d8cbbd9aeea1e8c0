"""The folder of one evaluation: a run directory without a trainer, with the published files beside its store.

    run.db, rollouts/               the store: every rollout, committed when it ended
    results.jsonl, metadata.json    the same as other programs of the field read it, written when the evaluation stops

Parts: `EvaluationFolder`, `new_results_path`. Invariants: one process writes to a folder at a time; a folder that has
only the published files (of an earlier release, or of verifiers) is taken into the store whole or not at all, before
anything else is written; the published files are replaced by rename.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mettle.errors import StorageError, UserError
from mettle.evals.output import record_of
from mettle.evals.results import METADATA, ResultsFolder, parsed_row
from mettle.evals.runner import StoreKeeper
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw
from mettle.storage.claim import FolderClaim
from mettle.storage.database import Database
from mettle.storage.evals import FINISHED, INTERRUPTED, EvalPlan, EvalStore, read_evals
from mettle.storage.rollouts import RolloutRow, read_rollout, rollout_rows
from mettle.storage.run_dir import RunDir
from mettle.storage.schema import MIGRATIONS
from mettle.storage.shards import ShardWriter

logger = logging.getLogger(__name__)

IMPORT_ROWS = 256
"""Published rows that are taken into the store at a time."""


class EvaluationFolder:
    """The folder of one evaluation, open for writing. `eval_id` is None before `begin` of a new one.

    Raises: UserError when another process writes there, StorageError when nobody can.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._run_dir = RunDir(path)
        self.published = ResultsFolder(path)
        self._claim = FolderClaim(path)
        try:
            self._database = Database(self._run_dir.ledger, MIGRATIONS)
            self._store = EvalStore(self._database, ShardWriter(self._run_dir.rollouts))
            rows = read_evals(self._database)
            self.eval_id = rows[-1].eval_id if rows else None
            self._check_published()
        except BaseException:
            self._claim.release()
            raise

    @property
    def metadata(self) -> dict[str, Any] | None:
        """What the evaluation that is here says of itself; None for a new one."""
        if self.eval_id is not None:
            return read_evals(self._database, self.eval_id)[0].metadata
        return self.published.read_metadata() if self.published.is_there() else None

    def has_rewards(self) -> bool:
        """True when a rollout that is here has a reward."""
        if self.eval_id is not None:
            return any(row.reward is not None for row in rollout_rows(self._database, self.eval_id))
        rows = map(parsed_row, self.published.lines())
        return any(row is not None and record_of(row).reward is not None for row in rows)

    def start_anew(self) -> None:
        """Forget rollouts of the store that failed, whatever they were of."""
        if self.eval_id is not None:
            self._store.forget_rollouts(self.eval_id)

    def begin(self, plan: EvalPlan) -> list[RolloutRow]:
        """Say what is planned; the rollouts that are there already, as far as they have a reward."""
        if self.eval_id is None and self.published.is_there():
            with self._database.transaction():
                self.eval_id = self._store.begin(plan)
                self._take_in(self.eval_id, plan)
        else:
            self.eval_id = self._store.begin(plan, self.eval_id)
        return [row for row in rollout_rows(self._database, self.eval_id) if row.reward is not None]

    def keeper(self) -> StoreKeeper:
        """Where finished rollouts go."""
        assert self.eval_id is not None, "an evaluation begins before it has rollouts"
        return StoreKeeper(self._store, self.eval_id)

    def record(self, rollout: RolloutRow) -> RolloutRecord | None:
        """A stored rollout; None where its shard is damaged, so that it must be run again."""
        try:
            return read_rollout(self._run_dir.rollouts, rollout)
        except StorageError as error:
            logger.warning("%s", error)
            return None

    def add(self, row: Mapping[str, Any]) -> None:
        """One more published row, which is seen when the evaluation stops. Raises: StorageError."""
        self.published.add(row)

    def end(self, metadata: Mapping[str, Any], *, is_finished: bool, **figures: Any) -> None:
        """Say how the evaluation ended, and publish it. Raises: StorageError when the disk is full."""
        assert self.eval_id is not None, "an evaluation ends after it has begun"
        self._store.end(self.eval_id, state=FINISHED if is_finished else INTERRUPTED, metadata=metadata, **figures)
        self.published.publish(metadata)

    def close(self) -> None:
        """Let another process write."""
        self.published.discard()
        self._database.close()
        self._claim.release()

    def _check_published(self) -> None:
        results = self.published.results
        if self.eval_id is None and not self.published.is_there() and results.exists() and results.stat().st_size:
            raise UserError(f"{results} has rows and no {METADATA} beside it; give another path")

    def _take_in(self, eval_id: int, plan: EvalPlan) -> None:
        """The published rollouts that have a reward, each in the next free place of its task."""
        positions: dict[str, int] = {}
        groups: list[GroupRecord] = []
        for number, line in enumerate(self.published.lines(), 1):
            row = parsed_row(line)
            if row is None or "example_id" not in row:
                logger.warning("line %d of %s is no result and is dropped", number, self.published.results)
                continue
            record = record_of(row)
            if record.reward is None:
                continue
            task = repr(record.example_id)
            position = positions[task] = positions.get(task, -1) + 1
            record = replace(record, rollout_id=rollout_prefix(eval_id, record.example_id, position), position=position)
            groups.append(GroupRecord(TaskDraw(-1, plan.env_id, record.uid, 0, record.example_id), 0, (record,)))
            if len(groups) == IMPORT_ROWS:
                self._store.add(eval_id, groups)
                groups = []
        if groups:
            self._store.add(eval_id, groups)


def rollout_prefix(eval_id: int, example_id: Any, position: int | None = None) -> str:
    """The beginning of the ids of a task's rollouts, or with `position` one of them."""
    prefix = f"e{eval_id}-{example_id}"
    return prefix if position is None else f"{prefix}-{position}"


def new_results_path(env_id: str, model: str, output_dir: Path | None = None) -> Path:
    """Where a new evaluation is saved: beside the environment's source when that is here, as its authors expect."""
    home = Path("environments") / env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")
    base = output_dir or (home if home.is_dir() else Path()) / "outputs" / "evals"
    return base / f"{env_id.replace('/', '--')}--{model.replace('/', '--')}" / os.urandom(4).hex()
