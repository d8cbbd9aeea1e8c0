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
    false,
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
from mettle.hub.registry import words
from mettle.hub.registry.archives import normalized_name
from mettle.web.problems import HttpError

PUBLIC: Final = "PUBLIC"
PRIVATE: Final = "PRIVATE"
READY: Final = "ready"
_AT_ONCE: Final = 500
"""Ids in one statement: databases take no more than some thousands."""
Order = Literal["relevance", "name", "created_at", "updated_at", "stars"]


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
    """Which environments to list. By relevance means by push where no words are asked for."""

    words: str = ""
    owner: str = ""
    visibility: str = ""
    tags: Sequence[str] = ()
    is_mine: bool = False
    is_starred: bool = False
    order: Order = "relevance"
    is_descending: bool = True
    limit: int = 20
    offset: int = 0


def list_environments(c: Connection, caller: Caller, wanted: Wanted) -> tuple[list[HubEnvironment], int]:
    """A page of those that the caller may see, and how many there are."""
    e = tables.environments.c
    hits = words.found(c, wanted.words) if wanted.words.strip() else None
    conditions = _conditions(c, caller, wanted)
    if wanted.words.strip() and hits is None:  # nothing but marks, which no text has as words
        conditions.append(false())
    place = tables.environments if hits is None else tables.environments.join(hits, hits.c.environment_id == e.id)
    column: ColumnElement[Any] = {"name": e.name, "created_at": e.created_at, "stars": e.num_stars}.get(
        wanted.order, e.updated_at
    )
    order = [column.desc() if wanted.is_descending else column.asc(), e.id]
    if hits is not None and wanted.order == "relevance":
        order.insert(0, hits.c.far.asc() if wanted.is_descending else hits.c.far.desc())
    ids = select(e.id).select_from(place).where(*conditions).order_by(*order)
    # The rows of the page alone are joined and built: those before it are only passed over.
    chosen = list(c.scalars(ids.limit(wanted.limit).offset(wanted.offset)))
    total = c.scalar(select(func.count()).select_from(place).where(*conditions)) or 0
    found: dict[str, HubEnvironment] = {}
    for first in range(0, len(chosen), _AT_ONCE):
        rows = c.execute(_query().where(e.id.in_(chosen[first : first + _AT_ONCE])))
        found |= {row.id: _environment(row) for row in rows}
    return [found[each] for each in chosen], int(total)


def list_names(c: Connection, caller: Caller, owner: str = "") -> list[str]:
    """The names that the caller may see of an owner; of all owners, those whose oldest environment they may see."""
    e, owners = tables.environments.c, tables.owners.c
    query = select(e.name, e.owner_id).where(_visible_to(caller), e.version != "").order_by(e.name)
    if owner:
        return list(
            c.scalars(query.where(e.owner_id == select(owners.id).where(owners.slug == owner).scalar_subquery()))
        )
    older = tables.environments.alias("older")
    is_earlier = or_(older.c.created_at < e.created_at, and_(older.c.created_at == e.created_at, older.c.id < e.id))
    return list(c.scalars(query.where(~select(literal(1)).where(older.c.name == e.name, is_earlier).exists())))


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
    row = c.execute(_query().where(tables.environments.c.id == environment_id)).first()
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
    num = select(func.count()).where(s.environment_id == environment.id).scalar_subquery()
    c.execute(update(tables.environments).where(tables.environments.c.id == environment.id).values(num_stars=num))


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


def refresh_listing(c: Connection, environment_id: str) -> None:
    """Bring what lists and searches read of it in step with its releases; in the transaction of their change."""
    e, o, r = tables.environments.c, tables.owners.c, tables.releases.c
    query = select(r.version, r.readme).where(r.environment_id == environment_id, r.state == READY)
    newest = c.execute(query.order_by(r.is_yanked, r.created_at.desc()).limit(1)).first()
    version, readme = ("", "") if newest is None else newest
    c.execute(update(tables.environments).where(e.id == environment_id).values(version=version))
    told = select(o.slug, e.name, e.description, e.tags).select_from(tables.environments.join(tables.owners))
    row = c.execute(told.where(e.id == environment_id)).one()
    words.keep_words(
        c, environment_id, name=f"{row.slug} {row.name}", said=" ".join((row.description, *row.tags)), readme=readme
    )


def _one(c: Connection, caller: Caller, condition: ColumnElement[bool]) -> HubEnvironment | None:
    row = c.execute(_query().where(condition, _visible_to(caller))).first()
    return None if row is None else _environment(row)


def _visible_to(caller: Caller) -> ColumnElement[bool]:
    e = tables.environments.c
    if caller.is_admin:
        return e.id.is_not(None)
    return or_(e.visibility == PUBLIC, e.owner_id.in_(caller.owner_ids))


def _conditions(c: Connection, caller: Caller, wanted: Wanted) -> list[ColumnElement[bool]]:
    e, owners = tables.environments.c, tables.owners.c
    conditions = [_visible_to(caller), e.version != ""]
    if wanted.owner:
        conditions.append(e.owner_id == select(owners.id).where(owners.slug == wanted.owner).scalar_subquery())
    if wanted.visibility:
        conditions.append(e.visibility == wanted.visibility)
    if wanted.is_mine:
        conditions.append(e.owner_id.in_(caller.owner_ids))
    if wanted.is_starred:
        mine = select(tables.stars.c.environment_id).where(tables.stars.c.person_id == _person_id(caller))
        conditions.append(e.id.in_(mine))
    place = func.instr if c.dialect.name == "sqlite" else func.strpos
    for tag in wanted.tags:  # a list as JSON: its first, or one after a comma
        told = cast(e.tags, Text)
        conditions.append(or_(place(told, "[" + json.dumps(tag)) == 1, place(told, ", " + json.dumps(tag)) > 0))
    return conditions


def _query() -> Any:
    e, owners = tables.environments.c, tables.owners.c
    columns = (
        e.id, e.owner_id, owners.slug, owners.kind, e.name, e.visibility, e.description, e.tags, e.forked_from,
        e.num_downloads, e.created_at, e.updated_at, e.num_stars, e.version,
    )  # fmt: skip
    return select(*columns).select_from(tables.environments.join(tables.owners, e.owner_id == owners.id))


def _environment(row: Row[Any]) -> HubEnvironment:
    return HubEnvironment(**dict(zip(HubEnvironment.__slots__, row, strict=True)))


def _spelt(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def _person_id(caller: Caller) -> str:
    return caller.person.id if caller.person else ""
