"""Environments: found, listed, made, changed, starred, forked, deleted.

Invariant: who may not see an environment cannot tell it from one that is not there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Text,
    and_,
    cast,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from mettle.hub import tables
from mettle.hub.accounts.identifiers import new_id
from mettle.hub.caller import Caller
from mettle.hub.registry.archives import normalized_name
from mettle.web.problems import HttpError

PUBLIC: Final = "PUBLIC"
PRIVATE: Final = "PRIVATE"
READY: Final = "ready"
Order = Literal["name", "created_at", "updated_at", "stars"]


@dataclass(frozen=True, slots=True)
class HubEnvironment:
    """An environment as lists and pages show it. `version` is the newest that is there, empty without one."""

    id: str
    owner_id: str
    owner: str
    owner_kind: str
    name: str
    visibility: str
    description: str
    tags: list[str]
    forked_from: str
    num_downloads: int
    created_at: float
    updated_at: float
    stars: int
    version: str

    @property
    def slug(self) -> str:
        return f"{self.owner}/{self.name}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which environments to list."""

    words: str = ""
    owner: str = ""
    visibility: str = ""
    tags: Sequence[str] = ()
    is_mine: bool = False
    is_starred: bool = False
    order: Order = "updated_at"
    is_descending: bool = True
    limit: int = 20
    offset: int = 0


def list_environments(c: Connection, caller: Caller, wanted: Wanted) -> tuple[list[HubEnvironment], int]:
    """A page of those that the caller may see, and how many there are."""
    e, owners = tables.environments.c, tables.owners.c
    conditions = [_visible_to(caller), _has_release()]
    for word in wanted.words.split()[:8]:
        like = f"%{word.replace('%', '').replace('_', '-').lower()}%"
        texts = func.lower(e.name + " " + owners.slug + " " + e.description)
        in_readme = select(literal(1)).where(
            tables.releases.c.environment_id == e.id, tables.releases.c.state == READY,
            func.lower(tables.releases.c.readme).like(like),
        )  # fmt: skip
        conditions.append(or_(texts.like(like), in_readme.exists()))
    if wanted.owner:
        conditions.append(owners.slug == wanted.owner)
    if wanted.visibility:
        conditions.append(e.visibility == wanted.visibility)
    if wanted.is_mine:
        conditions.append(e.owner_id.in_(caller.owner_ids))
    if wanted.is_starred:
        mine = select(tables.stars.c.environment_id).where(tables.stars.c.person_id == _person_id(caller))
        conditions.append(e.id.in_(mine))
    for tag in wanted.tags:  # so that few rows are looked at below; LIKE passes over the case of letters
        conditions.append(cast(e.tags, Text).contains(json.dumps(tag), autoescape=True))
    query, stars = _query()
    found = query.where(*conditions)
    column = {"name": e.name, "created_at": e.created_at, "updated_at": e.updated_at, "stars": stars}[wanted.order]
    ordered = found.order_by(column.desc() if wanted.is_descending else column.asc(), owners.slug, e.name)
    if wanted.tags:  # a list inside JSON is asked for differently by each database
        rows = [_environment(row) for row in c.execute(ordered)]
        rows = [row for row in rows if set(wanted.tags) <= set(row.tags)]
        return rows[wanted.offset : wanted.offset + wanted.limit], len(rows)
    joined = tables.environments.join(tables.owners, e.owner_id == owners.id)
    total = c.scalar(select(func.count()).select_from(joined).where(*conditions)) or 0
    return [_environment(row) for row in c.execute(ordered.limit(wanted.limit).offset(wanted.offset))], int(total)


def find_environment(c: Connection, caller: Caller, owner: str, name: str) -> HubEnvironment:
    """One by name. Raises: HttpError 404 for one that is not there, or not for the caller."""
    found = _one(c, caller, and_(tables.owners.c.slug == owner, tables.environments.c.name == _spelt(name)))
    if found is None:
        raise HttpError(404, f"Environment {owner[:60]}/{name[:100]} not found")
    return found


def environment_by_id(c: Connection, caller: Caller, environment_id: str) -> HubEnvironment:
    """One by id. Raises: HttpError 404 for one that is not there, or not for the caller."""
    found = _one(c, caller, tables.environments.c.id == environment_id)
    if found is None:
        raise HttpError(404, f"Environment {environment_id[:80]} not found")
    return found


def environment_of(c: Connection, environment_id: str) -> HubEnvironment:
    """One by id, for the Hub itself. Raises: HttpError 404 when it is gone."""
    row = c.execute(_query()[0].where(tables.environments.c.id == environment_id)).first()
    if row is None:
        raise HttpError(404, f"Environment {environment_id[:80]} not found")
    return _environment(row)


def must_push(caller: Caller, environment: HubEnvironment) -> None:
    """Raises: HttpError 403 for somebody who is neither its owner nor in its team."""
    if not caller.is_member(environment.owner_id):
        raise HttpError(403, f"only {environment.owner} publishes {environment.slug}; fork it to change it")


def must_govern(caller: Caller, environment: HubEnvironment) -> None:
    """Raises: HttpError 403 for somebody who is not its owner, an admin of its team, or an admin of the Hub."""
    if not caller.governs(environment.owner_id):
        raise HttpError(
            403, f"only {environment.owner}, or an admin of that team, changes or deletes {environment.slug}"
        )


def create_environment(
    c: Connection, owner_id: str, name: str, *, visibility: str = PRIVATE, forked_from: str = ""
) -> str:
    """A new one without a release; returns its id."""
    environment_id, now = new_id(), time.time()
    c.execute(
        insert(tables.environments).values(
            id=environment_id, owner_id=owner_id, name=normalized_name(name), visibility=checked_visibility(visibility),
            description="", tags=[], forked_from=forked_from, num_downloads=0, created_at=now, updated_at=now,
        )
    )  # fmt: skip
    return environment_id


def checked_visibility(visibility: str) -> str:
    """Raises: HttpError 422 for a word that is none."""
    word = visibility.upper()
    if word not in (PUBLIC, PRIVATE):
        raise HttpError(422, f"visibility is PUBLIC or PRIVATE, not {visibility[:40]!r}", param="visibility")
    return word


def set_visibility(c: Connection, environment: HubEnvironment, visibility: str) -> None:
    c.execute(
        update(tables.environments)
        .where(tables.environments.c.id == environment.id)
        .values(visibility=checked_visibility(visibility))
    )


def set_star(c: Connection, caller: Caller, environment: HubEnvironment, is_starred: bool) -> None:
    """Star, or take it back."""
    s = tables.stars.c
    c.execute(delete(tables.stars).where(s.environment_id == environment.id, s.person_id == _person_id(caller)))
    if is_starred:
        row = {"environment_id": environment.id, "person_id": _person_id(caller), "at": time.time()}
        c.execute(insert(tables.stars).values(row))


def has_star(c: Connection, caller: Caller, environment: HubEnvironment) -> bool:
    s = tables.stars.c
    here = and_(s.environment_id == environment.id, s.person_id == _person_id(caller))
    return c.scalar(select(func.count()).where(here)) == 1


def delete_environment(c: Connection, environment: HubEnvironment) -> None:
    """With its releases; their blobs go with the next sweep."""
    c.execute(delete(tables.environments).where(tables.environments.c.id == environment.id))


def count_download(c: Connection, environment_id: str) -> None:
    e = tables.environments.c
    c.execute(update(tables.environments).where(e.id == environment_id).values(num_downloads=e.num_downloads + 1))


def oldest_named(c: Connection, project: str) -> tuple[str, str] | None:
    """(owner, id) of the first environment that had a name here, whoever may see it."""
    e, owners = tables.environments.c, tables.owners.c
    query = select(owners.slug, e.id).select_from(tables.environments.join(tables.owners)).where(e.name == project)
    row = c.execute(query.order_by(e.created_at, e.id).limit(1)).first()
    return None if row is None else (str(row[0]), str(row[1]))


def _one(c: Connection, caller: Caller, condition: ColumnElement[bool]) -> HubEnvironment | None:
    row = c.execute(_query()[0].where(condition, _visible_to(caller))).first()
    return None if row is None else _environment(row)


def _visible_to(caller: Caller) -> ColumnElement[bool]:
    e = tables.environments.c
    if caller.is_admin:
        return e.id.is_not(None)
    return or_(e.visibility == PUBLIC, e.owner_id.in_(caller.owner_ids))


def _has_release() -> ColumnElement[bool]:
    r = tables.releases.c
    return select(literal(1)).where(r.environment_id == tables.environments.c.id, r.state == READY).exists()


def _query() -> tuple[Any, Any]:
    e, owners, r = tables.environments.c, tables.owners.c, tables.releases.c
    stars = (
        select(func.count())
        .where(tables.stars.c.environment_id == e.id)
        .correlate(tables.environments)
        .scalar_subquery()
    )
    newest = (
        select(r.version)
        .where(r.environment_id == e.id, r.state == READY)
        .order_by(r.is_yanked, r.created_at.desc())
        .limit(1)
        .correlate(tables.environments)
        .scalar_subquery()
    )
    columns = (
        e.id, e.owner_id, owners.slug, owners.kind, e.name, e.visibility, e.description, e.tags, e.forked_from,
        e.num_downloads, e.created_at, e.updated_at, stars, func.coalesce(newest, ""),
    )  # fmt: skip
    return select(*columns).select_from(tables.environments.join(tables.owners, e.owner_id == owners.id)), stars


def _environment(row: Row[Any]) -> HubEnvironment:
    return HubEnvironment(**dict(zip(HubEnvironment.__slots__, row, strict=True)))


def _spelt(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def _person_id(caller: Caller) -> str:
    return caller.person.id if caller.person else ""
