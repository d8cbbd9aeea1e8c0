"""Whose account an identity opens: the one that it belongs to, one with its e-mail, or a new one.

Invariants: an identity (issuer and subject) belongs to one account; an e-mail that the provider has not verified opens
and makes nothing; an account that is opened by its e-mail for the first time is closed to whatever opened it before,
since who entered that e-mail need not be who has it.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from mettle.errors import UserError
from mettle.hub import tables
from mettle.hub.accounts import audit, people
from mettle.hub.accounts.identifiers import MAX_SLUG, SLUG

if TYPE_CHECKING:
    from mettle.hub.accounts.people import Person
    from mettle.hub.oidc.config import OidcConfig
    from mettle.hub.oidc.identity import ProviderIdentity

NO_PASSWORD: Final = ""
"""What is stored for somebody who has none; no password is right then."""


@dataclass(frozen=True, slots=True)
class LinkedIdentity:
    """An identity as the person sees it whose account it opens."""

    issuer: str
    subject: str
    email: str
    created_at: float


def person_of(c: Connection, config: OidcConfig, identity: ProviderIdentity, *, address: str = "") -> Person:
    """Who signs in with an identity; made or linked where the settings say so. Raises: UserError where they do not."""
    found = _linked(c, identity)
    if found is None and config.link_by_email and identity.email:
        found = _with_email(c, identity, address)
    if found is None:
        found = _new_person(c, config, identity, address)
    if found.is_disabled:
        raise UserError("this account is shut; an admin of this Hub can open it again")
    return found


def link(c: Connection, identity: ProviderIdentity, person_id: str) -> None:
    """Let an identity open an account. Raises: UserError when it opens another one."""
    other = _linked(c, identity)
    if other is not None and other.id != person_id:
        raise UserError(f"this identity opens the account {other.slug!r} already; take it away there first")
    if other is not None:
        return
    row = {
        "issuer": identity.issuer, "subject": identity.subject, "person_id": person_id, "email": identity.email,
        "created_at": time.time(),
    }  # fmt: skip
    try:
        with c.begin_nested():
            c.execute(insert(tables.identities).values(row))
    except IntegrityError:
        raise UserError("this identity opens another account already; begin again") from None


def unlink(c: Connection, person_id: str, issuer: str, subject: str) -> None:
    """Take an identity away. Raises: UserError when the account has no other way in, or no such identity."""
    mine = identities_of(c, person_id)
    if not any((each.issuer, each.subject) == (issuer, subject) for each in mine):
        raise UserError("this account has no such identity")
    if len(mine) == 1 and not has_password(c, person_id):
        raise UserError("it is the only way into this account: have an admin send you a link for a password first")
    table = tables.identities.c
    c.execute(delete(tables.identities).where(table.issuer == issuer, table.subject == subject))


def identities_of(c: Connection, person_id: str) -> list[LinkedIdentity]:
    """What opens an account beside its password."""
    t = tables.identities.c
    rows = c.execute(
        select(t.issuer, t.subject, t.email, t.created_at).where(t.person_id == person_id).order_by(t.created_at)
    )
    return [LinkedIdentity(*row) for row in rows]


def has_password(c: Connection, person_id: str) -> bool:
    return bool(c.scalar(select(tables.people.c.password_hash).where(tables.people.c.id == person_id)))


def _linked(c: Connection, identity: ProviderIdentity) -> Person | None:
    t = tables.identities.c
    found = c.scalar(select(t.person_id).where(t.issuer == identity.issuer, t.subject == identity.subject))
    return None if found is None else people.person_by_id(c, found)


def _with_email(c: Connection, identity: ProviderIdentity, address: str) -> Person | None:
    """The one account that has the e-mail. What has opened it until now is closed: it may be somebody else's."""
    table = tables.people.c
    ids = list(c.scalars(select(table.id).where(func.lower(table.email) == identity.email.lower()).limit(2)))
    if len(ids) != 1 or identities_of(c, ids[0]):
        return None
    found = people.person_by_id(c, ids[0])
    if found is None or found.is_disabled:
        return found
    people.set_password(c, found.id, NO_PASSWORD)
    tokens: Any = tables.tokens
    c.execute(
        update(tokens)
        .where(tokens.c.person_id == found.id, tokens.c.revoked_at.is_(None))
        .values(revoked_at=time.time())
    )
    link(c, identity, found.id)
    said = f"{identity.issuer} {identity.email}; its password, sessions and tokens are closed"
    audit.note(c, found.slug, "identity.link", found.slug, detail=said, address=address)
    return found


def _new_person(c: Connection, config: OidcConfig, identity: ProviderIdentity, address: str) -> Person:
    if config.new_people == "nobody":
        raise UserError(
            "no account here belongs to you: ask an admin of this Hub for a link, then add this sign-in on the page of"
            " your account"
        )
    if config.new_people == "domains" and identity.domain not in config.domains:
        raise UserError(
            f"accounts here are for verified e-mails at {', '.join(config.domains)}; the provider named"
            f" {identity.email[:100] or 'no verified e-mail'}"
        )
    slug = _free_slug(c, identity)
    person = people.create_person(c, slug, NO_PASSWORD, name=identity.name, email=identity.email)
    link(c, identity, person.id)
    audit.note(c, slug, "join.oidc", slug, detail=f"{identity.issuer} {identity.email}".strip(), address=address)
    return person


def _free_slug(c: Connection, identity: ProviderIdentity) -> str:
    """A name that nobody has yet, like what the provider calls them."""
    said = identity.username.partition("@")[0] or identity.email.partition("@")[0] or identity.name
    base = re.sub(r"[^a-z0-9]+", "-", said.lower()).strip("-")[:MAX_SLUG].strip("-")
    base = base if SLUG.fullmatch(base) else "person"
    for number in range(1, 1000):
        ending = "" if number == 1 else f"-{number}"
        slug = base[: MAX_SLUG - len(ending)].rstrip("-") + ending
        if people.owner_id_of(c, slug) is None:
            return slug
    raise UserError(f"the names {base}, {base}-2 and so on are all taken; ask an admin of this Hub for a link")
