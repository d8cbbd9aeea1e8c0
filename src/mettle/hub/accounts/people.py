"""People of a Hub: made, found, listed, disabled; their passwords."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from mettle.errors import UserError
from mettle.hub import tables
from mettle.hub.accounts.identifiers import checked_slug, new_id

PERSON, TEAM = "person", "team"


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody with an account. `slug` is what they sign in with, and the owner of their environments."""

    id: str
    slug: str
    name: str
    email: str
    is_admin: bool
    is_disabled: bool
    created_at: float


def create_owner(c: Connection, slug: str, kind: str, name: str) -> str:
    """The row that a person and a team share, so that a name is one's alone; returns its id.

    Raises: UserError when the name is taken or is none.
    """
    owner_id = new_id()
    checked_slug(slug)
    try:
        with c.begin_nested():
            c.execute(
                insert(tables.owners).values(
                    id=owner_id, slug=slug, kind=kind, name=(name.strip() or slug)[:100], created_at=time.time()
                )
            )
    except IntegrityError:
        raise UserError(f"the name {slug!r} is already taken; choose another") from None
    return owner_id


def create_person(
    c: Connection, slug: str, password_hash: str, *, name: str = "", email: str = "", is_admin: bool = False
) -> Person:
    """A new account. Raises: UserError when the name is taken or is none."""
    person_id = create_owner(c, slug, PERSON, name)
    c.execute(
        insert(tables.people).values(
            id=person_id, email=email[:200], password_hash=password_hash, is_admin=is_admin, is_disabled=False
        )
    )
    found = find_person(c, slug)
    assert found is not None, "it was made in this transaction"
    return found


def find_person(c: Connection, slug: str) -> Person | None:
    """A person by name."""
    row = c.execute(_people().where(tables.owners.c.slug == slug)).first()
    return None if row is None else _person(row)


def owner_slug(c: Connection, owner_id: str) -> str:
    """What a person or team is called."""
    return str(c.scalar(select(tables.owners.c.slug).where(tables.owners.c.id == owner_id)) or owner_id)


def owner_id_of(c: Connection, slug: str) -> str | None:
    """Who has a name, person or team."""
    return c.scalar(select(tables.owners.c.id).where(tables.owners.c.slug == slug))


def person_by_id(c: Connection, person_id: str) -> Person | None:
    row = c.execute(_people().where(tables.owners.c.id == person_id)).first()
    return None if row is None else _person(row)


def list_people(c: Connection) -> list[Person]:
    """Everybody, by name."""
    return [_person(row) for row in c.execute(_people().order_by(tables.owners.c.slug))]


def num_admins(c: Connection) -> int:
    """Admins who can sign in."""
    people = tables.people.c
    return int(c.scalar(select(func.count()).where(people.is_admin, ~people.is_disabled)) or 0)


def password_of(c: Connection, slug: str) -> str | None:
    """The stored hash of a person who may sign in."""
    joined = tables.people.join(tables.owners)
    query = select(tables.people.c.password_hash).select_from(joined)
    found = c.scalar(query.where(tables.owners.c.slug == slug, ~tables.people.c.is_disabled))
    return None if found is None else str(found)


def set_password(c: Connection, person_id: str, password_hash: str) -> None:
    """Replace the password, and end every session that the old one opened."""
    c.execute(update(tables.people).where(tables.people.c.id == person_id).values(password_hash=password_hash))
    c.execute(tables.sessions.delete().where(tables.sessions.c.person_id == person_id))


def set_slug(c: Connection, person_id: str, slug: str) -> None:
    """Rename a person. Raises: UserError when the name is taken or is none."""
    try:
        with c.begin_nested():
            c.execute(update(tables.owners).where(tables.owners.c.id == person_id).values(slug=checked_slug(slug)))
    except IntegrityError:
        raise UserError(f"the name {slug!r} is already taken; choose another") from None


def set_disabled(c: Connection, person_id: str, is_disabled: bool) -> None:
    """Shut a person out, sessions and tokens at once, or let them in again. Raises: UserError for the last admin."""
    c.execute(update(tables.people).where(tables.people.c.id == person_id).values(is_disabled=is_disabled))
    if num_admins(c) == 0:
        raise UserError("this is the last admin who can sign in; make another one first")


def _people() -> Any:
    owners, people = tables.owners.c, tables.people.c
    columns = (
        owners.id,
        owners.slug,
        owners.name,
        people.email,
        people.is_admin,
        people.is_disabled,
        owners.created_at,
    )
    return select(*columns).select_from(tables.people.join(tables.owners))


def _person(row: Any) -> Person:
    return Person(row[0], row[1], row[2], row[3], row[4], row[5], row[6])
