"""Teams: made by a person, who is its first admin; members come by invitation or are added by its admins."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, delete, func, insert, select, update

from mettle.errors import UserError
from mettle.hub import tables
from mettle.hub.accounts.people import TEAM, Person, create_owner

ADMIN: Final = "ADMIN"
MEMBER: Final = "MEMBER"
ROLES: Final = (ADMIN, MEMBER)


@dataclass(frozen=True, slots=True)
class Team:
    """A team as one of its members sees it."""

    id: str
    slug: str
    name: str
    role: str
    joined_at: float


@dataclass(frozen=True, slots=True)
class TeamMember:
    """Somebody in a team."""

    id: str
    slug: str
    name: str
    email: str
    role: str
    joined_at: float


def create_team(c: Connection, slug: str, founder: Person, *, name: str = "") -> Team:
    """A new team. Raises: UserError when the name is taken or is none."""
    team_id = create_owner(c, slug, TEAM, name)
    add_member(c, team_id, founder.id, ADMIN)
    return next(team for team in teams_of(c, founder.id) if team.id == team_id)


def add_member(c: Connection, team_id: str, person_id: str, role: str) -> None:
    """Let somebody in, or change the role. Raises: UserError for a role that there is not, or the last admin's."""
    if role not in ROLES:
        raise UserError(f"a role is {' or '.join(ROLES)}, not {role!r}")
    places = tables.memberships.c
    here = (places.team_id == team_id) & (places.person_id == person_id)
    if c.execute(update(tables.memberships).where(here).values(role=role)).rowcount == 0:
        row = {"team_id": team_id, "person_id": person_id, "role": role, "joined_at": time.time()}
        c.execute(insert(tables.memberships).values(row))
    _keep_an_admin(c, team_id)


def remove_member(c: Connection, team_id: str, person_id: str) -> None:
    """Raises: UserError when it is the last admin."""
    places = tables.memberships.c
    c.execute(delete(tables.memberships).where(places.team_id == team_id, places.person_id == person_id))
    _keep_an_admin(c, team_id)


def teams_of(c: Connection, person_id: str) -> list[Team]:
    """The teams of a person, by name."""
    owners, places = tables.owners.c, tables.memberships.c
    query = (
        select(owners.id, owners.slug, owners.name, places.role, places.joined_at)
        .select_from(tables.memberships.join(tables.owners, places.team_id == owners.id))
        .where(places.person_id == person_id)
        .order_by(owners.slug)
    )
    return [Team(*row) for row in c.execute(query)]


def members_of(c: Connection, team_id: str) -> list[TeamMember]:
    """Who is in a team, its admins first."""
    owners, places, people = tables.owners.c, tables.memberships.c, tables.people.c
    joined = tables.memberships.join(tables.owners, places.person_id == owners.id).join(
        tables.people, people.id == owners.id
    )
    query = (
        select(owners.id, owners.slug, owners.name, people.email, places.role, places.joined_at)
        .select_from(joined)
        .where(places.team_id == team_id)
        .order_by(places.role, owners.slug)
    )
    return [TeamMember(*row) for row in c.execute(query)]


def _keep_an_admin(c: Connection, team_id: str) -> None:
    places = tables.memberships.c
    if not c.scalar(select(func.count()).where(places.team_id == team_id, places.role == ADMIN)):
        raise UserError("a team keeps at least one admin; make somebody else one first")
