"""The queue of submitted runs: a row each, whose status a person and the worker change.

QUEUED -> RUNNING -> COMPLETED | FAILED | STOPPED; a stopped or failed one may be queued again and goes on from its last
checkpoint. Invariant: one worker at a time takes a job, and what a person wants (a stop) is written before it is done.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from mettle.hub import tables
from mettle.hub.accounts.identifiers import new_id
from mettle.hub.caller import Caller
from mettle.web.problems import HttpError

QUEUED: Final = "QUEUED"
RUNNING: Final = "RUNNING"
COMPLETED: Final = "COMPLETED"
FAILED: Final = "FAILED"
STOPPED: Final = "STOPPED"
OVER: Final = (COMPLETED, FAILED, STOPPED)
MAX_WAITING: Final = 20
TRAIN: Final = "train"
EVAL: Final = "eval"


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One submitted run. Its columns are those of the table."""

    id: str
    owner_id: str
    submitted_by: str
    name: str
    model: str
    environments: list[str]
    config: dict[str, Any]
    status: str
    is_stop_wanted: bool
    error: str
    created_at: float
    updated_at: float
    started_at: float | None
    ended_at: float | None
    kind: str = TRAIN
    sealed: str = ""
    planned: dict[str, Any] | None = None
    num_tokens: int = 0
    result_id: str = ""


def run_folder(root: Path, job_id: str) -> Path:
    """The directory of its run."""
    return root / "runs" / job_id


def submit(
    c: Connection, caller: Caller, owner_id: str, *, name: str, model: str, environments: list[str],
    config: dict[str, Any], kind: str = TRAIN, result_id: str = "", planned: dict[str, Any] | None = None,
) -> TrainingJob:  # fmt: skip
    """Queue a run. Raises: HttpError 429 when the owner has too many that wait."""
    j, now = tables.jobs.c, time.time()
    waiting = c.scalar(select(func.count()).where(j.owner_id == owner_id, j.status.in_((QUEUED, RUNNING)))) or 0
    if waiting >= MAX_WAITING:
        raise HttpError(429, f"{waiting} runs of yours wait already; stop some, or come back when they are done")
    row = {
        "id": new_id(), "owner_id": owner_id, "submitted_by": caller.name, "name": name[:200], "model": model,
        "environments": environments, "config": config, "status": QUEUED, "is_stop_wanted": False, "error": "",
        "created_at": now, "updated_at": now, "started_at": None, "ended_at": None, "kind": kind,
        "result_id": result_id, "planned": planned,
    }  # fmt: skip
    c.execute(insert(tables.jobs).values(**row))
    return TrainingJob(**row)  # type: ignore[arg-type]


def find_job(c: Connection, caller: Caller, job_id: str) -> TrainingJob:
    """A run. Raises: HttpError 404 for one that is not there, or not the caller's."""
    j = tables.jobs.c
    row = c.execute(select(tables.jobs).where(j.id == job_id, j.kind == TRAIN, _own(caller))).first()
    if row is None:
        raise HttpError(404, f"Run {job_id[:80]} not found")
    return TrainingJob(**row._mapping)


def job_of(c: Connection, job_id: str) -> TrainingJob:
    """A job that is known to be there, as it is now."""
    return TrainingJob(**c.execute(select(tables.jobs).where(tables.jobs.c.id == job_id)).one()._mapping)


def find_by_result(c: Connection, caller: Caller, result_id: str) -> TrainingJob | None:
    """The job of a hosted evaluation; None for one that is not there, or not the caller's."""
    row = c.execute(select(tables.jobs).where(tables.jobs.c.result_id == result_id, _own(caller))).first()
    return None if row is None else TrainingJob(**row._mapping)


def list_jobs(c: Connection, caller: Caller, *, limit: int = 20, offset: int = 0) -> tuple[list[TrainingJob], int]:
    """The runs of the caller and the caller's teams, the newest first, and how many there are."""
    j = tables.jobs.c
    total = c.scalar(select(func.count()).select_from(tables.jobs).where(_own(caller), j.kind == TRAIN)) or 0
    rows = c.execute(
        select(tables.jobs)
        .where(_own(caller), j.kind == TRAIN)
        .order_by(j.created_at.desc())
        .limit(limit)
        .offset(offset)
    )
    return [TrainingJob(**row._mapping) for row in rows], int(total)


def num_ahead(c: Connection, job: TrainingJob) -> int:
    """Jobs of its kind that come before one that waits."""
    if job.status != QUEUED:
        return 0
    j = tables.jobs.c
    is_before = (j.status == RUNNING) | ((j.status == QUEUED) & (j.updated_at < job.updated_at))
    return int(c.scalar(select(func.count()).where(j.kind == job.kind, is_before, j.id != job.id)) or 0)


def want_stop(c: Connection, job: TrainingJob) -> None:
    """Ask for an end: at once for one that waits, by the worker for one that runs."""
    if job.status == QUEUED:
        set_status(c, job.id, STOPPED)
    elif job.status == RUNNING:
        set_values(c, job.id, is_stop_wanted=True)
    else:
        raise HttpError(409, f"this run is {job.status.lower()} already")


def queue_again(c: Connection, job: TrainingJob) -> None:
    """Let one that is over go on from its last checkpoint."""
    if job.status not in (STOPPED, FAILED):
        raise HttpError(409, f"this run is {job.status.lower()}; one that was stopped or has failed can go on")
    planned = None if job.planned is None else {**job.planned, "is_resumed": True}
    set_values(c, job.id, status=QUEUED, is_stop_wanted=False, error="", ended_at=None, planned=planned)


def claim(c: Connection, job_id: str) -> bool:
    """Take one that waits. False when somebody else has, or it was stopped."""
    j, now = tables.jobs.c, time.time()
    taken = update(tables.jobs).where(j.id == job_id, j.status == QUEUED)
    return c.execute(taken.values(status=RUNNING, started_at=now, updated_at=now)).rowcount == 1


def let_wait_again(c: Connection, job_id: str) -> None:
    """Put one whose worker is gone back into the queue, before those that came later."""
    j = tables.jobs.c
    c.execute(update(tables.jobs).where(j.id == job_id, j.status == RUNNING).values(status=QUEUED))


def delete_job(c: Connection, job: TrainingJob) -> None:
    """Raises: HttpError 409 for one that runs."""
    if job.status == RUNNING:
        raise HttpError(409, "this run is running; stop it first")
    c.execute(tables.jobs.delete().where(tables.jobs.c.id == job.id))


def set_status(c: Connection, job_id: str, status: str, *, error: str = "") -> None:
    now = time.time()
    when = {"started_at": now} if status == RUNNING else {"ended_at": now} if status in OVER else {}
    set_values(c, job_id, status=status, error=error[:2000], **when)


def with_status(c: Connection, status: str, kind: str = TRAIN) -> list[TrainingJob]:
    """All of a status and kind, the one that waits longest first."""
    j = tables.jobs.c
    rows = c.execute(select(tables.jobs).where(j.status == status, j.kind == kind).order_by(j.updated_at))
    return [TrainingJob(**row._mapping) for row in rows]


def set_tokens(c: Connection, job_id: str, num_tokens: int) -> None:
    """What it has taken in all. The place in the queue, which is its time of change, stays."""
    c.execute(update(tables.jobs).where(tables.jobs.c.id == job_id).values(num_tokens=num_tokens))


def set_values(c: Connection, job_id: str, **values: Any) -> None:
    """Change columns of one."""
    c.execute(update(tables.jobs).where(tables.jobs.c.id == job_id).values(**values, updated_at=time.time()))


def _own(caller: Caller) -> ColumnElement[bool]:
    j = tables.jobs.c
    return j.id.is_not(None) if caller.is_admin else j.owner_id.in_(caller.owner_ids)
