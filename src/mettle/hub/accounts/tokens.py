"""API tokens: scoped, shown once, stored as a digest, revocable.

A scope is an area with what may be done in it: `environments:write` includes `environments:read`. A token never has
more rights than its person has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, insert, or_, select, update

from mettle.errors import UserError
from mettle.hub import tables
from mettle.hub.accounts.identifiers import digest_of, new_id, new_secret

AREAS: Final = ("environments", "evals", "training", "sandboxes", "account")
SCOPES: Final = tuple(f"{area}:{right}" for area in AREAS for right in ("read", "write"))
PREFIX: Final = "mtl_"
_TOUCH_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Token:
    """A token as its person sees it."""

    id: str
    name: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float | None
    used_at: float | None


def checked_scopes(scopes: Sequence[str]) -> list[str]:
    """Raises: UserError for a scope that there is not, or none at all."""
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        what = f"no scope {unknown[0]!r}" if unknown else "a token needs a scope"
        raise UserError(f"{what}; there are {', '.join(SCOPES)}")
    return sorted(set(scopes))


def create_token(
    c: Connection, person_id: str, name: str, scopes: Sequence[str], *, days: float | None = None
) -> tuple[Token, str]:
    """A new token and its secret, which is not to be had again. Raises: UserError for what cannot be one."""
    name = name.strip()
    if not name or len(name) > 100:
        raise UserError("a token needs a name of at most 100 characters, so that you know later what it is for")
    if days is not None and not 0 < days <= 3650:
        raise UserError(f"a token lives for up to 3,650 days, not {days:g}")
    secret, now = new_secret(PREFIX), time.time()
    row = {
        "id": new_id(), "name": name, "scopes": checked_scopes(scopes), "created_at": now,
        "expires_at": None if days is None else now + days * 86400, "used_at": None,
    }  # fmt: skip
    c.execute(insert(tables.tokens).values(**row, person_id=person_id, digest=digest_of(secret)))
    return Token(**{**row, "scopes": tuple(row["scopes"])}), secret  # type: ignore[arg-type]


def holder_of(c: Connection, secret: str) -> tuple[str, str, tuple[str, ...], bool] | None:
    """(person, token, its scopes, whether its use is to be noted) of a secret that opens something now."""
    table, now = tables.tokens.c, time.time()
    query = select(table.person_id, table.id, table.scopes, table.used_at).where(
        table.digest == digest_of(secret),
        table.revoked_at.is_(None),
        or_(table.expires_at.is_(None), table.expires_at > now),
    )
    row = c.execute(query).first()
    if row is None:
        return None
    return str(row[0]), str(row[1]), tuple(row[2]), row[3] is None or row[3] < now - _TOUCH_S


def touch(c: Connection, token_id: str) -> None:
    """Note that a token was used; once a minute is enough."""
    c.execute(update(tables.tokens).where(tables.tokens.c.id == token_id).values(used_at=time.time()))


def tokens_of(c: Connection, person_id: str) -> list[Token]:
    """The tokens of a person that are not revoked, the newest first."""
    t = tables.tokens.c
    query = select(t.id, t.name, t.scopes, t.created_at, t.expires_at, t.used_at)
    rows = c.execute(query.where(t.person_id == person_id, t.revoked_at.is_(None)).order_by(t.created_at.desc()))
    return [Token(row[0], row[1], tuple(row[2]), *row[3:]) for row in rows]


def revoke(c: Connection, person_id: str, token_id: str) -> str:
    """Close a token for good; returns its name. Raises: UserError when the person has no such token."""
    t = tables.tokens.c
    name = c.scalar(select(t.name).where(t.id == token_id, t.person_id == person_id, t.revoked_at.is_(None)))
    if name is None:
        raise UserError(f"you have no token {token_id[:80]!r}")
    c.execute(update(tables.tokens).where(t.id == token_id).values(revoked_at=time.time()))
    return str(name)
