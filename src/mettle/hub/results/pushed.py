"""Pushed results: a row each, and a folder with the field's two files, which the pages of evaluations read.

Samples come in pieces, perhaps several at once. A piece counts when its transaction ends: the row says how many bytes
of `results.jsonl` count, and what a push that was cut off wrote behind them is written over by the next. Invariants:
one piece is added at a time (SQLite's one writer, PostgreSQL's lock on the row); what is completed never changes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, func, insert, or_, select, update

from mettle.errors import MettleError, StorageError, UserError
from mettle.evals.output import output_row, record_of
from mettle.evals.reader import EvaluationReader
from mettle.evals.report import plain
from mettle.evals.results import METADATA, RESULTS, parsed_row
from mettle.hub import tables
from mettle.hub.accounts.identifiers import new_id
from mettle.hub.caller import Caller
from mettle.storage.files import is_disk_full, write_json
from mettle.web.problems import HttpError

PENDING: Final = "PENDING"
RUNNING: Final = "RUNNING"
FAILED: Final = "FAILED"
CANCELLED: Final = "CANCELLED"
COMPLETED: Final = "COMPLETED"
MAX_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class PushedResult:
    """One pushed evaluation. Its columns are those of the table."""

    id: str
    owner_id: str
    pushed_by: str
    name: str
    environment: str
    environment_id: str | None
    model: str
    status: str
    is_public: bool
    framework: str
    metadata: dict[str, Any]
    metrics: dict[str, Any]
    num_samples: int
    num_bytes: int
    mean: float | None
    ci_low: float | None
    ci_high: float | None
    num_tasks: int
    created_at: float
    updated_at: float
    completed_at: float | None


@dataclass(frozen=True, slots=True)
class Described:
    """What a push says of an evaluation before its samples come."""

    name: str
    environment: str
    environment_id: str | None
    model: str
    is_public: bool
    framework: str
    metadata: dict[str, Any]
    metrics: dict[str, Any]


def folder_of(root: Path, result_id: str) -> Path:
    """Where its files lie."""
    return root / "results" / result_id


def create_result(c: Connection, caller: Caller, owner_id: str, told: Described) -> PushedResult:
    """A new one without samples."""
    now = time.time()
    row = {
        "id": new_id(), "owner_id": owner_id, "pushed_by": caller.name, "name": told.name[:200],
        "environment": told.environment[:160], "environment_id": told.environment_id, "model": told.model[:200],
        "status": RUNNING, "is_public": told.is_public, "framework": told.framework[:60], "metadata": told.metadata,
        "metrics": told.metrics, "num_samples": 0, "num_bytes": 0, "mean": None, "ci_low": None, "ci_high": None,
        "num_tasks": 0, "created_at": now, "updated_at": now, "completed_at": None,
    }  # fmt: skip
    c.execute(insert(tables.results).values(**row))
    return PushedResult(**row)  # type: ignore[arg-type]


def find_result(c: Connection, caller: Caller, result_id: str, *, is_locked: bool = False) -> PushedResult:
    """`is_locked`: nobody else changes it before this transaction ends.

    Raises: HttpError 404 for one that is not there, or not for the caller.
    """
    query = select(tables.results).where(tables.results.c.id == result_id, visible_to(caller))
    row = c.execute(query.with_for_update() if is_locked else query).first()
    if row is None:
        raise HttpError(404, f"Evaluation {result_id[:80]} not found")
    return _result(row)


def must_own(caller: Caller, result: PushedResult) -> None:
    """Raises: HttpError 403 for somebody whose it is not."""
    if not caller.is_member(result.owner_id) and not caller.is_admin:
        raise HttpError(403, "only who pushed it, or their team, changes an evaluation")


def list_results(
    c: Connection, caller: Caller, *, environment: str = "", environment_id: str = "", words: str = "",
    is_mine: bool = False, limit: int = 20, offset: int = 0,
) -> tuple[list[PushedResult], int]:  # fmt: skip
    """Those that the caller may see, the newest first, and how many there are."""
    r = tables.results.c
    conditions = [visible_to(caller)]
    if environment:
        conditions.append(is_of(environment))
    if environment_id:
        conditions.append(r.environment_id == environment_id)
    if is_mine:
        conditions.append(r.owner_id.in_(caller.owner_ids))
    for word in words.split()[:8]:
        like = f"%{word.replace('%', '').lower()}%"
        conditions.append(func.lower(r.name + " " + r.environment + " " + r.model).like(like))
    total = c.scalar(select(func.count()).select_from(tables.results).where(*conditions)) or 0
    rows = c.execute(
        select(tables.results).where(*conditions).order_by(r.created_at.desc(), r.id).limit(limit).offset(offset)
    )
    return [_result(row) for row in rows], int(total)


def is_of(environment: str) -> ColumnElement[bool]:
    """Whether a row is of an environment, which may be named without its owner."""
    r = tables.results.c
    return or_(r.environment == environment, r.environment.like(f"%/{environment}"))


def add_samples(c: Connection, root: Path, result: PushedResult, samples: Sequence[Mapping[str, Any]]) -> int:
    """Add a piece; returns how many samples there are. Call inside a `write`, with the row read there.

    Raises: HttpError 409 when it is completed, 413 when it grows too large; StorageError when the disk refuses.
    """
    if result.status == COMPLETED:
        raise HttpError(409, "this evaluation is completed, and does not change any more; push another")
    data = "".join(json.dumps(sample, separators=(",", ":")) + "\n" for sample in samples).encode()
    if result.num_bytes + len(data) > MAX_BYTES:
        raise HttpError(413, f"an evaluation has at most {MAX_BYTES >> 30} GiB of samples")
    folder = folder_of(root, result.id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / RESULTS).open("ab") as file:
            file.truncate(result.num_bytes)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        what = "no space left" if is_disk_full(error) else error.strerror or str(error)
        raise StorageError(f"storing samples: {what}; nothing of this piece is kept") from error
    num = result.num_samples + len(samples)
    values = {"num_samples": num, "num_bytes": result.num_bytes + len(data), "updated_at": time.time()}
    c.execute(update(tables.results).where(tables.results.c.id == result.id).values(**values))
    return num


def set_status(c: Connection, result_id: str, status: str) -> None:
    """Where a hosted evaluation stands. One that is completed stays so."""
    r = tables.results.c
    changed = update(tables.results).where(r.id == result_id, r.status != COMPLETED)
    c.execute(changed.values(status=status, updated_at=time.time()))


def result_of(c: Connection, result_id: str) -> PushedResult:
    """One, for the Hub itself. Raises: HttpError 404 when it was deleted."""
    row = c.execute(select(tables.results).where(tables.results.c.id == result_id)).first()
    if row is None:
        raise HttpError(404, "this evaluation was deleted meanwhile")
    return _result(row)


def begin_again(c: Connection, result_id: str) -> None:
    """Let what an attempt has left of samples count for nothing."""
    c.execute(update(tables.results).where(tables.results.c.id == result_id).values(num_samples=0, num_bytes=0))


def complete(
    c: Connection, root: Path, result: PushedResult, metrics: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
) -> PushedResult:  # fmt: skip
    """Write what the pages read, work out the mean and its interval from the samples, and close it."""
    if result.status == COMPLETED:
        return result
    folder = folder_of(root, result.id)
    told = {**(metadata or {}), **result.metadata, "env_id": result.environment, "model": result.model}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / RESULTS).open("ab") as file:
            file.truncate(result.num_bytes)
        write_json(folder / METADATA, told, is_durable=True)
        stats = plain(EvaluationReader(folder).stats())
        write_json(folder / METADATA, {**told, "stats": stats}, is_durable=True)
    except OSError as error:
        raise StorageError(f"completing an evaluation: {error.strerror or error}") from error
    except UserError as error:
        raise HttpError(422, f"these samples cannot be read: {error}") from error
    reward = stats.get("reward") or {}
    low, high = reward.get("interval") or (None, None)
    now = time.time()
    values = {
        "status": COMPLETED, "metadata": {**(metadata or {}), **result.metadata},
        "metrics": {**result.metrics, **metrics}, "mean": reward.get("mean"), "ci_low": low,
        "ci_high": high, "num_tasks": int(reward.get("num_tasks") or 0), "updated_at": now,
        "completed_at": now,
    }  # fmt: skip
    c.execute(update(tables.results).where(tables.results.c.id == result.id).values(**values))
    return result_of(c, result.id)


def change_result(c: Connection, result: PushedResult, **values: Any) -> None:
    """Set what a person may change afterwards: its name, and who sees it."""
    c.execute(update(tables.results).where(tables.results.c.id == result.id).values(**values, updated_at=time.time()))


def delete_result(c: Connection, root: Path, result: PushedResult) -> None:
    c.execute(tables.results.delete().where(tables.results.c.id == result.id))
    shutil.rmtree(folder_of(root, result.id), ignore_errors=True)


def must_be_completed(result: PushedResult) -> None:
    """Raises: HttpError 409 while it is not."""
    if result.status != COMPLETED:
        raise HttpError(409, f"the evaluation {result.name} is not completed yet")


def reader_of(root: Path, result: PushedResult) -> EvaluationReader:
    """Its rollouts. Raises: HttpError 409 while it is not completed."""
    must_be_completed(result)
    try:
        return EvaluationReader(folder_of(root, result.id))
    except MettleError as error:
        raise HttpError(503, f"the files of this evaluation cannot be read: {error}") from error


def samples_of(root: Path, result: PushedResult, first: int, limit: int) -> list[dict[str, Any]]:
    """Some of its samples, as they are published; the lines before them are passed over, and those behind not read.

    Raises: HttpError 409 while it is not completed, 503 when the file cannot be read.
    """
    must_be_completed(result)
    try:
        with (folder_of(root, result.id) / RESULTS).open("rb") as file:
            rows = map(parsed_row, islice(file, first, first + limit))
            return [output_row(record_of(row)) for row in rows if row is not None]
    except OSError as error:
        raise HttpError(503, f"the files of this evaluation cannot be read: {error.strerror or error}") from error


def visible_to(caller: Caller) -> ColumnElement[bool]:
    """What the caller may see of the table of results."""
    r = tables.results.c
    if caller.is_admin:
        return r.id.is_not(None)
    return or_(r.is_public, r.owner_id.in_(caller.owner_ids))


def _result(row: Row[Any]) -> PushedResult:
    return PushedResult(**row._mapping)
