"""Sign-ins that a browser was sent to the provider for, and has not come back from.

Invariant: one is taken once, within `PENDING_S`, and by the browser that began it, so that nobody can make another
browser end theirs (login CSRF).
"""

from __future__ import annotations

import secrets
import time
from typing import Final, NamedTuple

from sqlalchemy import Connection, delete, insert, select

from mettle.errors import UserError
from mettle.hub import tables
from mettle.hub.accounts.identifiers import digest_of, new_secret

PENDING_S: Final = 600.0


class PendingSignIn(NamedTuple):
    """`person_id` is who adds the identity to the account that they have; None for a sign-in."""

    nonce: str
    verifier: str
    following: str
    person_id: str | None


def begin_sign_in(
    c: Connection, browser: str, *, following: str, person_id: str | None = None
) -> tuple[str, PendingSignIn]:
    """A new one of the browser with a secret of its own; returns its `state`."""
    state, now = new_secret(), time.time()
    c.execute(delete(tables.sign_ins).where(tables.sign_ins.c.created_at < now - PENDING_S))
    made = PendingSignIn(secrets.token_urlsafe(24), secrets.token_urlsafe(48), following[:2000], person_id)
    row = {"digest": digest_of(state), "browser": digest_of(browser), "created_at": now, **made._asdict()}
    c.execute(insert(tables.sign_ins).values(row))
    return state, made


def take_sign_in(c: Connection, browser: str, state: str) -> PendingSignIn:
    """What a browser comes back to, and never again. Raises: UserError when it has begun no such sign-in."""
    table = tables.sign_ins.c
    mine = (table.digest == digest_of(state)) & (table.browser == digest_of(browser))
    row = c.execute(
        select(table.nonce, table.verifier, table.following, table.person_id).where(
            mine, table.created_at > time.time() - PENDING_S
        )
    ).first()
    # Two servers may read it at once, and one of them deletes it.
    if row is None or c.execute(delete(tables.sign_ins).where(mine)).rowcount != 1:
        raise UserError("this sign-in was not begun in this browser, is over, or is too old; begin again")
    return PendingSignIn(*row)
