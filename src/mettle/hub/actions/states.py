"""Where the check of each release stands: a few columns of its row, which the checker and people change.

PENDING -> RUNNING -> SUCCESS | FAILED | CANCELLED (this host could not check it); the words are the field's. Invariant:
what a checker that was killed has left RUNNING is begun again, and no more than `MAX_ATTEMPTS` times.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, select, update

from mettle.hub import tables
from mettle.hub.registry.catalogue import READY
from mettle.hub.registry.releases import Release
from mettle.web.problems import HttpError

PENDING: Final = "PENDING"
RUNNING: Final = "RUNNING"
SUCCESS: Final = "SUCCESS"
FAILED: Final = "FAILED"
CANCELLED: Final = "CANCELLED"
OVER: Final = (SUCCESS, FAILED, CANCELLED)
MAX_ATTEMPTS: Final = 3
MAX_LOG_CHARS: Final = 100_000
_AGAIN: Final = "the Hub ended meanwhile; begun again"


def next_waiting(c: Connection) -> Release | None:
    """The release that waits longest."""
    r = tables.releases.c
    query = select(tables.releases).where(r.card_state == PENDING, r.state == READY).order_by(r.created_at).limit(1)
    row = c.execute(query).first()
    return None if row is None else Release(**row._mapping)


def begin(c: Connection, release: Release) -> bool:
    """Take one that waits; False when somebody else has."""
    r = tables.releases.c
    taken = update(tables.releases).where(r.id == release.id, r.card_state == PENDING).values(card_state=RUNNING)
    return c.execute(taken).rowcount == 1


def keep_log(c: Connection, release_id: str, log: str) -> None:
    """What was said until now."""
    c.execute(update(tables.releases).where(tables.releases.c.id == release_id).values(card_log=_cut(log)))


def end(c: Connection, release_id: str, state: str, card: dict[str, Any] | None, log: str) -> None:
    """Keep what came of it. One that was deleted or asked for again meanwhile is left alone."""
    r = tables.releases.c
    ended = update(tables.releases).where(r.id == release_id, r.card_state == RUNNING, r.state == READY)
    c.execute(ended.values(card_state=state, card=card, card_log=_cut(log)))


def recover(c: Connection) -> int:
    """Let what a checker that is gone has left go on, or give it up; returns how many there were."""
    r = tables.releases.c
    left = [Release(**row._mapping) for row in c.execute(select(tables.releases).where(r.card_state == RUNNING))]
    for release in left:
        times = release.card_log.count(_AGAIN) + 1
        is_over = times >= MAX_ATTEMPTS
        said = f"error: the Hub ended {times} times while this was checked; given up" if is_over else _AGAIN
        values = {"card_state": FAILED if is_over else PENDING, "card_log": _cut(f"{release.card_log}{said}\n")}
        c.execute(update(tables.releases).where(r.id == release.id).values(**values))
    return len(left)


def retry(c: Connection, release: Release) -> None:
    """Check it once more. Raises: HttpError 409 for one that is being checked."""
    r = tables.releases.c
    again = update(tables.releases).where(r.id == release.id, r.card_state.notin_((PENDING, RUNNING)))
    if c.execute(again.values(card_state=PENDING, card=None, card_log="")).rowcount != 1:
        raise HttpError(409, f"the check of {release.version} {'waits' if release.card_state == PENDING else 'runs'}")


def _cut(log: str) -> str:
    """Its end, and no zero bytes: PostgreSQL keeps none."""
    return log.replace("\0", "\ufffd")[-MAX_LOG_CHARS:]
