"""Which evaluations there are, each by its metadata.

Parts: `EvaluationEntry`; `list_evaluations` (what is saved here), `evaluations_in` (one folder).
Invariant: no rollout is read for a list, and what cannot be read is one entry's problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.errors import MettleError, UserError
from mettle.evals.estimator import RunningMean
from mettle.evals.places import find_folders
from mettle.evals.results import METADATA, ResultsFolder
from mettle.storage.database import Database
from mettle.storage.evals import FINISHED, RUNNING, EvalRow, read_evals
from mettle.storage.run_dir import RunDir
from mettle.storage.schema import MIGRATIONS
from mettle.wording import number

OWN_KIND = "eval"
"""Of an evaluation that was run by itself: it is the only one of its folder."""

PUBLISHED_STATE = "published"
"""Of an evaluation that is only there as the files that are published: they do not say how it ended."""


@dataclass(frozen=True, slots=True)
class EvaluationEntry:
    """One evaluation, by its metadata. `problem` says why there is none.

    `state` is running (or killed), finished, interrupted or published. `num_rollouts` are done, `planned_rollouts` were
    asked for; None where the files do not say. `eval_id` tells apart those of one run directory.
    """

    path: Path
    modified_at: float
    metadata: dict[str, Any]
    problem: str | None = None
    eval_id: int | None = None
    kind: str = "eval"
    step: int = 0
    state: str = PUBLISHED_STATE
    num_rollouts: int | None = None
    planned_rollouts: int | None = None
    measured: tuple[float | None, tuple[float, float] | None] | None = None
    """Mean and interval of the reward as the store has them, so that a list needs no rollout."""
    warning: str | None = None
    """What of the metadata could not be read and was passed over."""

    @property
    def env_id(self) -> str:
        """The environment; the folder's name where the metadata does not say it."""
        return str(self.metadata.get("env_id") or self.metadata.get("env") or self.path.parent.name)

    @property
    def model(self) -> str:
        """The model; the policy version where a run evaluated its own."""
        own = "?" if self.eval_id is None or self.kind == OWN_KIND else f"{self.path.name} v{self.step}"
        return str(self.metadata.get("model") or own)

    @property
    def name(self) -> str:
        """What a command takes: the folder, with the number of the evaluation where the run has several kinds."""
        return str(self.path) if self.eval_id is None or self.kind == OWN_KIND else f"{self.path}:{self.eval_id}"

    @property
    def reward(self) -> float | None:
        """Mean over tasks of the reward so far; what the file says where only that is there."""
        if self.measured is not None:
            return self.measured[0]
        saved = self._saved("reward")
        return number(self.metadata.get("avg_reward") if saved is None else saved.get("mean"))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the reward; None while it runs."""
        if self.measured is not None:
            return self.measured[1]
        ends = (self._saved("reward") or {}).get("interval")
        low, high = map(number, ends) if isinstance(ends, list | tuple) and len(ends) == 2 else (None, None)
        return None if low is None or high is None else (low, high)

    @property
    def error_rate(self) -> float | None:
        """The share of rollouts that failed."""
        return number(self.metadata.get("avg_error"))

    @property
    def cost_usd(self) -> float | None:
        """What it cost."""
        cost = self.metadata.get("cost")
        return number(cost.get("total_usd")) if isinstance(cost, dict) else None

    @property
    def num_done(self) -> int | None:
        """Rollouts that are there; None where the files do not say."""
        if self.num_rollouts is not None:
            return self.num_rollouts
        stats = self.metadata.get("stats")
        counted = number(stats.get("num_rollouts")) if isinstance(stats, dict) else None
        return None if counted is None else int(counted)

    @property
    def num_planned(self) -> int | None:
        """Rollouts that were asked for; None where the files do not say."""
        if self.planned_rollouts is not None:
            return self.planned_rollouts
        tasks, each = (number(self.metadata.get(name)) for name in ("num_examples", "rollouts_per_example"))
        return int(tasks * each) if tasks is not None and each is not None and tasks >= 0 else None

    def _saved(self, name: str) -> dict[str, Any] | None:
        """A part of the statistics that a finished evaluation publishes."""
        stats = self.metadata.get("stats")
        found = stats.get(name) if isinstance(stats, dict) else None
        return found if isinstance(found, dict) else None

    @property
    def is_complete(self) -> bool:
        """True unless the store knows that some of it was not run."""
        return self.state in (FINISHED, PUBLISHED_STATE)

    @property
    def time_s(self) -> float | None:
        """How long it took, None while it runs; older files have milliseconds under another name."""
        if self.state == RUNNING:
            return None
        milliseconds = number(self.metadata.get("time_ms"))
        return number(self.metadata.get("time")) if milliseconds is None else milliseconds / 1000


def list_evaluations(root: Path = Path()) -> list[EvaluationEntry]:
    """Every evaluation of a workspace, or under a folder of evaluations, the newest first."""
    entries = [entry for path in find_evaluations(root) for entry in entries_or_problem(path)]
    return sorted(entries, key=lambda entry: entry.modified_at, reverse=True)


def find_evaluations(root: Path = Path(), *, passing_over: Path | None = None) -> list[Path]:
    """Folders with evaluations: those of a workspace (`mettle.evals.places`), and runs that have some."""
    return find_folders(root, passing_over=passing_over)


def entries_or_problem(folder: Path) -> list[EvaluationEntry]:
    """As `evaluations_in`; nothing for a run that has none, and the reason for a folder that cannot be read."""
    try:
        if (folder / METADATA).exists() or is_stored(folder):
            return evaluations_in(folder)
    except MettleError as error:
        return [EvaluationEntry(folder, 0.0, {}, str(error))]
    except Exception as error:  # A damage that nobody thought of is that evaluation's, and never the whole list's.
        return [EvaluationEntry(folder, 0.0, {}, f"cannot be read: {type(error).__name__}: {error}")]
    return []


def evaluations_in(folder: Path) -> list[EvaluationEntry]:
    """The evaluations of one folder, oldest first: a run directory's, or the one that is published there."""
    if is_stored(folder):
        database = stored_in(folder)
        try:
            return [_stored_entry(folder, database, row) for row in read_evals(database)]
        finally:
            database.close()
    return [_published_entry(folder)]


def is_stored(folder: Path) -> bool:
    """True when `folder` is a run directory that has an evaluation."""
    if not RunDir(folder).ledger.exists():
        return False
    database = stored_in(folder)
    try:
        return bool(database.value("SELECT count(*) FROM sqlite_master WHERE name = 'evals'")) and bool(
            database.value("SELECT count(*) FROM evals")
        )
    finally:
        database.close()


def stored_in(folder: Path) -> Database:
    """The store of a run directory, to be read; the caller closes it."""
    return Database(RunDir(folder).ledger, MIGRATIONS, is_read_only=True)


def _stored_entry(folder: Path, database: Database, row: EvalRow) -> EvaluationEntry:
    about: dict[str, Any] = {"env_id": row.env_id, "model": row.model, **row.metadata}
    if not row.is_finished:
        mean, interval = _mean_so_far(database, row.eval_id), None
    else:
        mean = row.mean
        interval = None if row.ci_low is None or row.ci_high is None else (row.ci_low, row.ci_high)
    if row.num_rollouts:
        about |= {"avg_reward": mean, "avg_error": row.num_errors / row.num_rollouts}
    return EvaluationEntry(
        folder, row.updated_at or row.created_at, about, None, row.eval_id, row.kind, row.step, row.state,
        row.num_rollouts, row.planned_rollouts, (mean, interval),
    )  # fmt: skip


def _mean_so_far(database: Database, eval_id: int) -> float | None:
    """The estimator's mean over tasks, as far as an evaluation is."""
    running = RunningMean()
    for row in database.rows(
        "SELECT coalesce(example_id, uid) AS task, reward FROM rollouts WHERE eval_id = ?", (eval_id,)
    ):
        if row["reward"] is not None:
            running.add(row["task"], row["reward"])
    return running.mean


def _published_entry(path: Path) -> EvaluationEntry:
    file = path / METADATA
    try:
        modified_at = file.stat().st_mtime
    except OSError:
        modified_at = 0.0
    try:
        metadata, warning = ResultsFolder(path).described()
        return EvaluationEntry(path, modified_at, metadata, warning=warning)
    except UserError as error:
        return EvaluationEntry(path, modified_at, {}, str(error))
