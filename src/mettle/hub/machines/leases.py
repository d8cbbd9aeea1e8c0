"""Work that is lent to joined machines: which has what, until when, and what happens when nothing is heard.

Parts: `lend`, `live_lease`, `renew`, `end_lease`, `expire`, `take_back`, `alone_in`. A lease is one generation of its
job's; the work goes back into the queue when it is given back or runs out, and the next lease is the next generation.
Invariants: a job has one held lease at most (the database refuses a second of a generation); what a machine writes
under a lease that is not held is refused, and `alone_in` orders that check, the write, and the next one's beginning.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, func, insert, select, update

from mettle.hub import tables
from mettle.hub.accounts import audit
from mettle.hub.accounts.identifiers import new_id
from mettle.hub.lab import Lab
from mettle.hub.results import pushed
from mettle.hub.training import jobs
from mettle.web.problems import HttpError

HELD: Final = "HELD"
ENDED: Final = "ENDED"
BACK: Final = "BACK"
EXPIRED: Final = "EXPIRED"


@dataclass(frozen=True, slots=True)
class WorkLease:
    """One. Its columns are those of the table."""

    id: str
    job_id: str
    machine_id: str
    generation: int
    state: str
    begun_at: float
    expires_at: float
    ended_at: float | None


def lend(c: Connection, lab: Lab, machine_id: str, job_id: str) -> WorkLease | None:
    """Claim a job for a machine; None when somebody else has it."""
    if not jobs.claim(c, job_id):
        return None
    x, now = tables.leases.c, time.time()
    last = c.scalar(select(func.max(x.generation)).where(x.job_id == job_id)) or 0
    made = WorkLease(new_id(), job_id, machine_id, int(last) + 1, HELD, now, now + lab.lease_s, None)
    c.execute(insert(tables.leases).values(**{name: getattr(made, name) for name in WorkLease.__slots__}))
    return made


def live_lease(c: Connection, machine_id: str, lease_id: str) -> WorkLease:
    """A machine's own lease that is held.

    Raises: HttpError 404 for one that is not its own, 409 for one that has ended, whose work may be another's.
    """
    x = tables.leases.c
    row = c.execute(select(tables.leases).where(x.id == lease_id, x.machine_id == machine_id)).first()
    if row is None:
        raise HttpError(404, f"there is no lease {lease_id[:60]!r} of this machine")
    found = WorkLease(**row._mapping)
    if found.state != HELD:  # what is overdue, and was not taken back yet, is still its own
        raise HttpError(409, "this lease is over: its work may be another's by now", code="lease_lost")
    return found


def held_by(c: Connection, machine_id: str) -> list[WorkLease]:
    """What a machine has, the oldest first."""
    x = tables.leases.c
    query = select(tables.leases).where(x.machine_id == machine_id, x.state == HELD)
    return [WorkLease(**row._mapping) for row in c.execute(query.order_by(x.begun_at))]


def leased_jobs(c: Connection) -> set[str]:
    """Ids of the jobs that machines have."""
    x = tables.leases.c
    return set(c.scalars(select(x.job_id).where(x.state == HELD)))


def renew(c: Connection, lab: Lab, lease: WorkLease) -> None:
    """It was heard of just now."""
    x = tables.leases.c
    held = update(tables.leases).where(x.id == lease.id, x.state == HELD)
    c.execute(held.values(expires_at=time.time() + lab.lease_s))


def renew_all(c: Connection, lab: Lab) -> None:
    """The Hub itself was away: nobody is late for that."""
    c.execute(update(tables.leases).where(tables.leases.c.state == HELD).values(expires_at=time.time() + lab.lease_s))


def end_lease(c: Connection, lease: WorkLease, state: str) -> bool:
    """False when it was over already."""
    x = tables.leases.c
    held = update(tables.leases).where(x.id == lease.id, x.state == HELD)
    return c.execute(held.values(state=state, ended_at=time.time())).rowcount == 1


def take_back(c: Connection, lease: WorkLease, state: str, why: str) -> None:
    """End a lease before its work is done; the work waits again, or is over where that was asked for."""
    if not end_lease(c, lease, state):
        return
    job = jobs.job_of(c, lease.job_id)
    if job.status == jobs.RUNNING:
        if job.is_stop_wanted:
            jobs.set_status(c, job.id, jobs.STOPPED, error=job.error)
            pushed.set_status(c, job.result_id, pushed.CANCELLED)
        else:
            jobs.let_wait_again(c, job.id)
            pushed.set_status(c, job.result_id, pushed.PENDING)
    audit.note(c, "the Hub", "lease.back", job.name, detail=why)


def expire(lab: Lab) -> int:
    """Take back what was not heard of for too long; how many. One that is being written to is heard of right now."""
    with lab.database.read() as c:
        due = _overdue(c)
    num = 0
    for lease in due:
        with suppress(BlockingIOError), alone_in(lab, lease.job_id, waits=False), lab.database.write() as c:
            if lease.id in {each.id for each in _overdue(c)}:
                take_back(c, lease, EXPIRED, "its machine was not heard of")
                num += 1
    return num


def _overdue(c: Connection) -> list[WorkLease]:
    x = tables.leases.c
    rows = c.execute(select(tables.leases).where(x.state == HELD, x.expires_at <= time.time()))
    return [WorkLease(**row._mapping) for row in rows]


@contextmanager
def alone_in(lab: Lab, job_id: str, *, waits: bool = True) -> Iterator[None]:
    """Nobody else writes into a job's folder, in this server or another of the Hub's, while the block runs.

    Raises: BlockingIOError where somebody does and it `waits` for nobody.
    """
    folder = lab.folder / "leases"
    folder.mkdir(exist_ok=True, mode=0o700)
    handle = os.open(folder / f"{job_id}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)
