"""What becomes of an evaluation at the Hub: what it took, and how it ends. The same wherever its process ran.

Parts: `evaluation_folder`, `count_tokens`, `keep_to_quota`, `end_evaluation`. Invariant: its rollouts become the
result's samples in the transaction that completes the job, all of them or none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mettle.errors import MettleError
from mettle.evals.reader import EvaluationReader
from mettle.hub.evaluating.source import LOG
from mettle.hub.lab import Lab
from mettle.hub.logs import hide
from mettle.hub.results import pushed
from mettle.hub.training import jobs, usage
from mettle.hub.training.jobs import TrainingJob
from mettle.hub.training.told import hidden_of
from mettle.hub.training.worker import last_words
from mettle.web.problems import HttpError

logger = logging.getLogger(__name__)
PIECE_ROWS = 500


def evaluation_folder(root: Path, job_id: str) -> Path:
    """Where an evaluation's order, log and rollouts lie."""
    return root / "evaluations" / job_id


def count_tokens(lab: Lab, job: TrainingJob) -> None:
    """Add what it has taken, where its model was served by a machine of this Hub."""
    settings = job.config.get("settings") or {}
    if settings.get("api_base_url") or settings.get("provider"):
        return
    found = evaluation_folder(lab.folder, job.id).glob("results/*/*/run.db")
    total = sum(usage.played_tokens(each) for each in found)
    with lab.database.write() as c:
        usage.settle(c, jobs.job_of(c, job.id), total)


def keep_to_quota(lab: Lab, job: TrainingJob) -> None:
    """Count what it has taken so far, and ask for its end where its owner's month is used up."""
    count_tokens(lab, job)
    with lab.database.write() as c:
        if not job.is_stop_wanted and usage.is_over(c, job.owner_id):
            jobs.set_values(c, job.id, is_stop_wanted=True, error="stopped: the month's quota is used up")


def end_evaluation(lab: Lab, job: TrainingJob, code: int) -> None:
    """Its process has ended: keep its rollouts, or say why there are none."""
    count_tokens(lab, job)
    if job.is_stop_wanted:
        end_as(lab, job, jobs.STOPPED, pushed.CANCELLED, job.error)
    elif code:
        words = hide(last_words(evaluation_folder(lab.folder, job.id) / LOG), hidden_of(lab, job))
        end_as(lab, job, jobs.FAILED, pushed.FAILED, words)
    else:
        try:
            _keep(lab, job)
        except (MettleError, HttpError) as error:
            end_as(lab, job, jobs.FAILED, pushed.FAILED, str(error))


def end_as(lab: Lab, job: TrainingJob, status: str, shown: str, error: str = "") -> None:
    with lab.database.write() as c:
        jobs.set_status(c, job.id, status, error=error)
        pushed.set_status(c, job.result_id, shown)
    logger.info("an evaluation has ended", extra={"job": job.id, "status": status})


def _keep(lab: Lab, job: TrainingJob) -> None:
    """Put its rollouts where pushed ones are: all of them, and as completed, or none."""
    folder = evaluation_folder(lab.folder, job.id)
    found = next(iter(sorted(folder.glob("results/*/*/metadata.json"))), None)
    if found is None:
        raise HttpError(409, "it has left no results")
    reader = EvaluationReader(found.parent)
    with lab.database.write() as c:
        pushed.begin_again(c, job.result_id)
        for piece in _pieces(reader.rows()):
            pushed.add_samples(c, lab.folder, pushed.result_of(c, job.result_id), piece)
        result = pushed.result_of(c, job.result_id)
        told = {key: value for key, value in reader.metadata.items() if key not in ("stats", "path_to_save")}
        pushed.complete(c, lab.folder, result, {}, told)
        jobs.set_status(c, job.id, jobs.COMPLETED)
    logger.info("an evaluation has ended", extra={"job": job.id, "status": jobs.COMPLETED})


def _pieces(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    piece: list[dict[str, Any]] = []
    for row in rows:
        piece.append(row)
        if len(piece) >= PIECE_ROWS:
            yield piece
            piece = []
    if piece:
        yield piece
