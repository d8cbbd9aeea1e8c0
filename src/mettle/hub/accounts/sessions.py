"""Sessions of browsers, one-time links, and the sign-in of a terminal by way of a browser."""

from __future__ import annotations

import secrets
import time
from typing import Final, NamedTuple

from sqlalchemy import Connection, delete, insert, select, update

from mettle.errors import UserError
from mettle.hub import tables
from mettle.hub.accounts.identifiers import digest_of, new_secret

SESSION_S: Final = 14 * 86400.0
LINK_S: Final = 3 * 86400.0
CHALLENGE_S: Final = 900.0


class BrowserSession(NamedTuple):
    """A browser that is signed in. `csrf` stands in each of its forms."""

    person_id: str
    csrf: str


class Link(NamedTuple):
    """What a one-time link is for: `admin` (the first account), `invitation` (an account, and a team), `password`."""

    digest: str
    kind: str
    person_id: str | None
    team_id: str | None


def open_session(c: Connection, person_id: str) -> str:
    """Sign a browser in; returns the secret for its cookie."""
    secret, now = new_secret(), time.time()
    c.execute(delete(tables.sessions).where(tables.sessions.c.expires_at < now))
    c.execute(
        insert(tables.sessions).values(
            digest=digest_of(secret), person_id=person_id, csrf=secrets.token_urlsafe(24), created_at=now,
            expires_at=now + SESSION_S,
        )
    )  # fmt: skip
    return secret


def find_session(c: Connection, secret: str) -> BrowserSession | None:
    """The session of a cookie."""
    table = tables.sessions.c
    row = c.execute(
        select(table.person_id, table.csrf).where(table.digest == digest_of(secret), table.expires_at > time.time())
    ).first()
    return None if row is None else BrowserSession(*row)


def close_session(c: Connection, secret: str) -> None:
    c.execute(delete(tables.sessions).where(tables.sessions.c.digest == digest_of(secret)))


def make_link(
    c: Connection, kind: str, *, person_id: str | None = None, team_id: str | None = None, lives_s: float = LINK_S
) -> str:
    """A secret that works once. One for the first admin replaces the one before."""
    secret, now = new_secret(), time.time()
    if kind == "admin":
        c.execute(delete(tables.links).where(tables.links.c.kind == "admin"))
    c.execute(
        insert(tables.links).values(
            digest=digest_of(secret), kind=kind, person_id=person_id, team_id=team_id, created_at=now,
            expires_at=now + lives_s,
        )
    )  # fmt: skip
    return secret


def find_link(c: Connection, secret: str) -> Link:
    """What a link is for. Raises: UserError when it was used, is too old, or never was."""
    table = tables.links.c
    row = c.execute(
        select(table.digest, table.kind, table.person_id, table.team_id).where(
            table.digest == digest_of(secret), table.used_at.is_(None), table.expires_at > time.time()
        )
    ).first()
    if row is None:
        raise UserError("this link was used already, or is too old; ask for another")
    return Link(*row)


def use_link(c: Connection, link: Link) -> None:
    """Raises: UserError when somebody else was quicker."""
    table = tables.links.c
    done = c.execute(
        update(tables.links).where(table.digest == link.digest, table.used_at.is_(None)).values(used_at=time.time())
    )
    if done.rowcount != 1:
        raise UserError("this link was used already, or is too old; ask for another")


def open_challenge(c: Connection, public_key: str) -> tuple[str, str]:
    """Begin the sign-in of a terminal: the code for a person to look at, and the secret that the terminal asks with."""
    code, secret, now = secrets.token_hex(4).upper(), new_secret("sat_"), time.time()
    c.execute(delete(tables.challenges).where(tables.challenges.c.created_at < now - CHALLENGE_S))
    c.execute(
        insert(tables.challenges).values(code=code, digest=digest_of(secret), public_key=public_key, created_at=now)
    )
    return code, secret


def is_challenge_open(c: Connection, code: str) -> bool:
    """True while a code waits for somebody to approve it."""
    return _challenge(c, code) is not None


def approve_challenge(c: Connection, code: str, person_id: str) -> None:
    """Raises: UserError when the code waits for nobody."""
    if _challenge(c, code) is None:
        raise UserError(f"no terminal waits with the code {code[:16]!r}; begin again with `mettle login`")
    c.execute(update(tables.challenges).where(tables.challenges.c.code == code).values(person_id=person_id))


def take_challenge(c: Connection, code: str, secret: str) -> tuple[str, str] | None:
    """(person, public key) once it was approved, and then never again; None while it waits.

    Raises: UserError when it waits for nobody.
    """
    table = tables.challenges.c
    row = c.execute(
        select(table.person_id, table.public_key).where(
            table.code == code, table.digest == digest_of(secret), table.created_at > time.time() - CHALLENGE_S
        )
    ).first()
    if row is None:
        raise UserError("this sign-in is over or too old; begin again with `mettle login`")
    if row[0] is None:
        return None
    c.execute(delete(tables.challenges).where(table.code == code))
    return str(row[0]), str(row[1])


def _challenge(c: Connection, code: str) -> str | None:
    table = tables.challenges.c
    found = c.scalar(
        select(table.code).where(
            table.code == code, table.person_id.is_(None), table.created_at > time.time() - CHALLENGE_S
        )
    )
    return None if found is None else str(found)
