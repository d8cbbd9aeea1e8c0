"""The machines that have joined: invited, let in, seen, asked to leave, removed.

Parts: `invite`, `join`, `machine_of`, `list_machines`, `list_invitations`. An invitation lets one machine in, within a
day, and is shown once; the machine makes its own secret, of which the Hub keeps the digest, and with which it may do
what `leases` gives it and nothing else. Invariants: an invitation and a machine's secret open no other door of the
Hub; a machine that was removed opens none at all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, insert, or_, select, update

import mettle
from mettle.hub import tables
from mettle.hub.accounts.identifiers import digest_of, new_id, new_secret
from mettle.web.problems import HttpError

ACTIVE: Final = "ACTIVE"
LEAVING: Final = "LEAVING"
LEFT: Final = "LEFT"
REMOVED: Final = "REMOVED"
JOIN_PREFIX: Final = "mtj_"
SECRET_PREFIX: Final = "mtm_"
INVITATION_S: Final = 86_400.0
MAX_OPEN: Final = 200
SEEN_EVERY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class JoinedMachine:
    """One. Its columns are those of the table, without the digest."""

    id: str
    name: str
    state: str
    address: str
    joined_at: float
    seen_at: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JoinInvitation:
    """An invitation that nobody has used yet."""

    id: str
    name: str
    made_by: str
    created_at: float
    expires_at: float


def invite(c: Connection, made_by: str, name: str) -> tuple[JoinInvitation, str]:
    """A new invitation and its token. Raises: HttpError 422 for a name that is none, 429 for too many open ones."""
    name = name.strip()
    if not name or len(name) > 60 or not name.isprintable():
        raise HttpError(422, "a machine needs a name of at most 60 characters, by which people know it")
    if len(list_invitations(c)) >= MAX_OPEN:
        raise HttpError(429, f"{MAX_OPEN} invitations are open; revoke some, or wait until they run out")
    secret, now = new_secret(JOIN_PREFIX), time.time()
    made = JoinInvitation(new_id(), name, made_by, now, now + INVITATION_S)
    row = {
        "id": made.id, "digest": digest_of(secret), "name": name, "made_by": made_by, "machine_id": None,
        "created_at": now, "expires_at": made.expires_at, "revoked_at": None,
    }  # fmt: skip
    c.execute(insert(tables.machine_invitations).values(**row))
    return made, secret


def list_invitations(c: Connection) -> list[JoinInvitation]:
    """Those that still let a machine in, the newest first."""
    i = tables.machine_invitations.c
    is_open = (i.machine_id.is_(None), i.revoked_at.is_(None), i.expires_at > time.time())
    query = select(i.id, i.name, i.made_by, i.created_at, i.expires_at).where(*is_open)
    return [JoinInvitation(*row) for row in c.execute(query.order_by(i.created_at.desc()))]


def revoke_invitation(c: Connection, invitation_id: str) -> str:
    """Close one; returns its name. Raises: HttpError 404 when there is none that is open."""
    found = next((each for each in list_invitations(c) if each.id == invitation_id), None)
    if found is None:
        raise HttpError(404, f"there is no open invitation {invitation_id[:60]!r}")
    i = tables.machine_invitations.c
    c.execute(update(tables.machine_invitations).where(i.id == found.id).values(revoked_at=time.time()))
    return found.name


def must_be_this_release(version: str) -> None:
    """Raises: HttpError 409 for a machine with another release, whose work would be another's."""
    if version != mettle.__version__:
        raise HttpError(
            409, f"this machine has Mettle {version[:40] or 'of an unknown release'} and the Hub {mettle.__version__}:"
            f" install {mettle.__version__} there", code="version_mismatch",
        )  # fmt: skip


def join(c: Connection, token: str, digest: str, version: str, facts: dict[str, Any], address: str) -> JoinedMachine:
    """Let a machine in that keeps the secret of `digest`. Asked again with both, it answers the same machine.

    Raises: HttpError 401 for a token that lets nobody in, 409 for another release of Mettle.
    """
    i, m, now = tables.machine_invitations.c, tables.machines.c, time.time()
    row = c.execute(select(i.id, i.name, i.machine_id, i.revoked_at, i.expires_at).where(i.digest == digest_of(token)))
    found = row.first()
    if found is not None and found.machine_id is not None:
        known = c.execute(select(tables.machines).where(m.id == found.machine_id, m.digest == digest)).first()
        if known is not None and known.state != REMOVED:
            return machine_by_id(c, found.machine_id)
    if found is None or found.machine_id is not None or found.revoked_at is not None or found.expires_at <= now:
        message = "this token lets no machine in: it was used or revoked, has run out, or never was; make another"
        raise HttpError(401, message, code="invalid_join_token")
    must_be_this_release(version)
    made = JoinedMachine(new_id(), found.name, ACTIVE, address[:60], now, now, facts)
    row_of = {name: getattr(made, name) for name in JoinedMachine.__slots__}
    c.execute(insert(tables.machines).values(**row_of, digest=digest))
    c.execute(update(tables.machine_invitations).where(i.id == found.id).values(machine_id=made.id))
    return made


def machine_of(c: Connection, secret: str) -> JoinedMachine | None:
    """The machine of a secret; None for one that opens nothing."""
    m = tables.machines.c
    found = c.scalar(select(m.id).where(m.digest == digest_of(secret), m.state != REMOVED))
    return None if found is None else machine_by_id(c, found)


def machine_by_id(c: Connection, machine_id: str) -> JoinedMachine:
    """Raises: HttpError 404 for one that is not there."""
    m = tables.machines.c
    query = select(m.id, m.name, m.state, m.address, m.joined_at, m.seen_at, m.facts).where(m.id == machine_id)
    row = c.execute(query).first()
    if row is None:
        raise HttpError(404, f"there is no machine {machine_id[:60]!r}")
    return JoinedMachine(**row._mapping)


def list_machines(c: Connection, *, left_after: float = 0.0) -> list[JoinedMachine]:
    """Those that are here, by name, then those that have left since a time."""
    m = tables.machines.c
    query = select(m.id, m.name, m.state, m.address, m.joined_at, m.seen_at, m.facts)
    shown = or_(m.state.in_((ACTIVE, LEAVING)), (m.state == LEFT) & (m.seen_at > left_after))
    return [JoinedMachine(**row._mapping) for row in c.execute(query.where(shown).order_by(m.state == LEFT, m.name))]


def set_state(c: Connection, machine_id: str, state: str) -> None:
    c.execute(update(tables.machines).where(tables.machines.c.id == machine_id).values(state=state))


def seen(c: Connection, machine_id: str, address: str, facts: dict[str, Any] | None) -> None:
    """It was heard of just now."""
    values = {"seen_at": time.time(), "address": address[:60]} | ({} if facts is None else {"facts": facts})
    c.execute(update(tables.machines).where(tables.machines.c.id == machine_id).values(**values))
