"""What jobs take: tokens by month, person and team; quotas, and prices.

A token counts when the Hub's machine has worked on it: those of the batches that a run has trained on, prompts and
answers, by its ledger; those that an evaluation's model has read and written, where this machine serves the model, and
those of its training services. Parts: `settle` (adds what a job has taken since the last look), `must_have_room`,
`month_of`, `usage_of`. Invariants: a token is counted once, at the price of its moment, and stays counted when its run
is deleted; what waits is reckoned with by its plan.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, select, update

from mettle.errors import StorageError
from mettle.hub import tables
from mettle.hub.accounts.people import owner_slug
from mettle.hub.training import jobs
from mettle.hub.training.jobs import TrainingJob
from mettle.storage.ledger import Ledger
from mettle.web.problems import HttpError

ANY_MODEL: Final = "*"
_TRAINED: Final = (
    "SELECT coalesce(sum(num_tokens), 0) FROM batches WHERE trained_at IS NOT NULL AND step > coalesce("
    "(SELECT json_extract(value, '$.step') FROM meta WHERE key = 'branched_from'), 0)"
)
"""The first steps of a branch are those of the run that it comes from, where they were counted."""
_PLAYED: Final = "SELECT coalesce(sum(num_tokens), 0) + coalesce(sum(input_tokens), 0) FROM rollouts"


def month_of(at: float) -> str:
    """The month of a time, in UTC, as `2026-11`."""
    return time.strftime("%Y-%m", time.gmtime(at))


def trained_tokens(run_db: Path) -> int:
    """Tokens of the batches that a run has trained on; 0 before it has a ledger."""
    return _count(run_db, _TRAINED)


def played_tokens(run_db: Path) -> int:
    """Tokens that an evaluation's model has read, where it said so, and written."""
    return _count(run_db, _PLAYED)


def _count(run_db: Path, query: str) -> int:
    if not run_db.exists():
        return 0
    try:
        with closing(Ledger(run_db, is_read_only=True)) as ledger:
            return int(ledger.database.value(query))
    except StorageError:
        return 0  # being made, or damaged, which the run itself says


def settle(c: Connection, job: TrainingJob, total: int, *, now: float | None = None) -> int:
    """Count what a job has taken beyond what is counted; that much. A count that falls (a run begun anew) adds none."""
    taken = total - job.num_tokens
    if taken <= 0:
        return 0
    month = month_of(time.time() if now is None else now)
    usd = taken * price_of(c, job.model) / 1e6
    u = tables.usage.c
    known = update(tables.usage).where(u.job_id == job.id, u.month == month)
    if not c.execute(known.values(num_tokens=u.num_tokens + taken, usd=u.usd + usd)).rowcount:
        row = {
            "job_id": job.id, "month": month, "owner_id": job.owner_id, "person": job.submitted_by, "name": job.name,
            "model": job.model, "num_tokens": taken, "usd": usd,
        }  # fmt: skip
        c.execute(insert(tables.usage).values(**row))
    jobs.set_tokens(c, job.id, total)
    return taken


def count_answer(c: Connection, owner_id: str, person: str, model: str, num_tokens: int) -> None:
    """Add what a model of this Hub has read and written for somebody who asked it under `/v1`: a row a month, person
    and model."""
    _add(c, _row_of("answers", owner_id, model), owner_id, person, "answers", model, num_tokens)


def count_trained(c: Connection, owner_id: str, model: str, since: float, total: int) -> int:
    """Add what a training service has read and written for somebody, `total` in all, beyond what is counted; that much.

    `since` tells the counters of one service from those of another that was begun anew.
    """
    u, row_id = tables.usage.c, _row_of("adapters", owner_id, f"{model}|{since!r}")
    counted = int(c.scalar(select(func.sum(u.num_tokens)).where(u.job_id == row_id)) or 0)
    if total > counted:
        _add(c, row_id, owner_id, owner_slug(c, owner_id), "adapters", model, total - counted)
    return max(0, total - counted)


def _row_of(kind: str, owner_id: str, what: str) -> str:
    """The id of the rows of what is no job."""
    return f"{kind}-" + hashlib.sha256(f"{owner_id}|{what}".encode()).hexdigest()[:40]


def _add(c: Connection, row_id: str, owner_id: str, person: str, name: str, model: str, num_tokens: int) -> None:
    """To this month's row."""
    month, u = month_of(time.time()), tables.usage.c
    usd = num_tokens * price_of(c, model) / 1e6
    known = update(tables.usage).where(u.job_id == row_id, u.month == month)
    if not c.execute(known.values(num_tokens=u.num_tokens + num_tokens, usd=u.usd + usd)).rowcount:
        row = {"job_id": row_id, "month": month, "owner_id": owner_id, "person": person, "name": name}
        c.execute(insert(tables.usage).values(**row, model=model[:200], num_tokens=num_tokens, usd=usd))


def quota_of(c: Connection, owner_id: str) -> int | None:
    """Tokens a month; None for as many as there are."""
    q = tables.quotas.c
    return c.scalar(select(q.tokens_a_month).where(q.owner_id == owner_id))


def set_quota(c: Connection, owner_id: str, tokens_a_month: int | None) -> None:
    """None takes it away."""
    c.execute(delete(tables.quotas).where(tables.quotas.c.owner_id == owner_id))
    if tokens_a_month is not None:
        c.execute(insert(tables.quotas).values(owner_id=owner_id, tokens_a_month=tokens_a_month))


def price_of(c: Connection, model: str) -> float:
    """US dollars for a million tokens: the model's own price, that of all others, or nothing."""
    p = tables.prices.c
    found: dict[str, float] = {
        row.model: row.usd_per_mtok for row in c.execute(select(tables.prices).where(p.model.in_((model, ANY_MODEL))))
    }
    return found.get(model, found.get(ANY_MODEL, 0.0))


def set_price(c: Connection, model: str, usd_per_mtok: float | None) -> None:
    """None takes it away."""
    c.execute(delete(tables.prices).where(tables.prices.c.model == model))
    if usd_per_mtok is not None:
        c.execute(insert(tables.prices).values(model=model, usd_per_mtok=usd_per_mtok))


def prices(c: Connection) -> dict[str, float]:
    """By model."""
    return {row.model: row.usd_per_mtok for row in c.execute(select(tables.prices).order_by(tables.prices.c.model))}


def tokens_this_month(c: Connection, owner_id: str, *, now: float | None = None) -> int:
    """That an owner's jobs have taken since the month began."""
    u = tables.usage.c
    month = month_of(time.time() if now is None else now)
    return int(c.scalar(select(func.sum(u.num_tokens)).where(u.owner_id == owner_id, u.month == month)) or 0)


def planned_tokens(c: Connection, owner_id: str) -> int:
    """That an owner's jobs which wait or run will still take, by their plans."""
    j = tables.jobs.c
    rows = c.execute(
        select(j.planned, j.num_tokens).where(j.owner_id == owner_id, j.status.in_((jobs.QUEUED, jobs.RUNNING)))
    )
    return sum(max(0, int((row.planned or {}).get("num_tokens", 0)) - row.num_tokens) for row in rows)


def must_have_room(c: Connection, owner_id: str, more: int) -> None:
    """Raises: HttpError 403 where a job would lead beyond the month's quota."""
    quota = quota_of(c, owner_id)
    if quota is None:
        return
    used, waiting = tokens_this_month(c, owner_id), planned_tokens(c, owner_id)
    if used + waiting + more > quota:
        left = max(0, quota - used - waiting)
        raise HttpError(
            403, f"this job may take {more:,} tokens, and {owner_slug(c, owner_id)} has {left:,}"
            f" left of {quota:,} this month ({used:,} used, {waiting:,} planned by what waits): make it smaller, or ask"
            " an admin of this Hub for more", code="quota_exceeded",
        )  # fmt: skip


def is_over(c: Connection, owner_id: str) -> bool:
    """Whether an owner has taken more than the month's quota."""
    quota = quota_of(c, owner_id)
    return quota is not None and tokens_this_month(c, owner_id) > quota


@dataclass(frozen=True, slots=True)
class OwnerUsage:
    """An owner's month. `quota` None is no limit; `people` and `jobs` have (name, tokens, US dollars)."""

    owner: str
    quota: int | None
    num_tokens: int
    planned: int
    usd: float
    people: list[tuple[str, int, float]]
    jobs: list[tuple[str, str, str, int, float]]
    """(id, name, model, tokens, US dollars), the largest first."""

    def to_dict(self) -> dict[str, Any]:
        """As the API answers it."""
        person, job = ("user", "tokens", "usd"), ("id", "name", "model", "tokens", "usd")
        return {
            "owner": self.owner, "quota": self.quota, "tokens": self.num_tokens, "planned_tokens": self.planned,
            "usd": self.usd, "people": [dict(zip(person, each, strict=True)) for each in self.people],
            "jobs": [dict(zip(job, each, strict=True)) for each in self.jobs],
        }  # fmt: skip


def usage_of(c: Connection, owner_id: str, month: str, *, num_jobs: int = 50) -> OwnerUsage:
    """An owner's month."""
    u = tables.usage.c
    here = (u.owner_id == owner_id) & (u.month == month)
    planned = planned_tokens(c, owner_id) if month == month_of(time.time()) else 0
    tokens, usd = func.sum(u.num_tokens), func.sum(u.usd)
    total = c.execute(select(func.coalesce(tokens, 0), func.coalesce(usd, 0.0)).where(here)).one()
    people = c.execute(select(u.person, tokens, usd).where(here).group_by(u.person).order_by(tokens.desc()))
    found = c.execute(
        select(u.job_id, u.name, u.model, u.num_tokens, u.usd)
        .where(here)
        .order_by(u.num_tokens.desc(), u.job_id)
        .limit(num_jobs)
    )
    return OwnerUsage(
        owner_slug(c, owner_id), quota_of(c, owner_id), int(total[0]), planned, float(total[1]),
        [(row[0], int(row[1]), float(row[2])) for row in people],
        [(*row[:3], int(row[3]), float(row[4])) for row in found],
    )  # fmt: skip


def owners_with_usage(c: Connection, month: str) -> list[str]:
    """Ids of the owners who have used something in a month, or have a quota."""
    u, q = tables.usage.c, tables.quotas.c
    used = c.scalars(select(u.owner_id).where(u.month == month).distinct())
    return sorted({*used, *c.scalars(select(q.owner_id))})
