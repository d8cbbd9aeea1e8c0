"""The environments that ship with Mettle, published into a Hub by the one who runs it.

They belong to the team `mettle`, which is made where it is missing; the Hub's admins are its admins. A version that is
there already is passed over, so that it can be done again after an update.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, insert, select

from mettle.envs.packages.archive import Packed, pack
from mettle.envs.packages.registry import SHIPPED
from mettle.hub import tables
from mettle.hub.accounts import audit, people, teams
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.registry import catalogue, releases
from mettle.hub.registry.releases import Announced
from mettle.storage.files import sha256_file
from mettle.web.problems import HttpError

OWNER: Final = "mettle"


def publish_shipped(lab: Lab, on_each: Callable[[str, str], None], folder: Path = SHIPPED) -> int:
    """Publish every environment under `folder`; returns how many were new. `on_each` hears its name and what was done.

    Raises: UserError when a person is called `mettle`, StorageError when the disk refuses, ServiceError for a build.
    """
    with lab.database.write() as c:
        owner_id = _owner(c)
    num = 0
    for package in sorted(path.parent for path in folder.glob("*/pyproject.toml")):
        with tempfile.TemporaryDirectory(prefix="mettle-init-") as scratch:
            packed = pack(package, Path(scratch))
            is_new = _publish(lab, owner_id, packed)
        num += is_new
        on_each(f"{OWNER}/{packed.name}@{packed.version}", "published" if is_new else "there already")
    return num


def _publish(lab: Lab, owner_id: str, packed: Packed) -> bool:
    keeper = _keeper(owner_id)
    metadata = {"dependencies": packed.project.get("dependencies") or []}
    try:
        with lab.database.write() as c:
            environment_id = _environment(c, keeper, owner_id, packed.name)
            environment = catalogue.environment_by_id(c, keeper, environment_id)
            releases.announce_wheel(
                c, environment, _file(packed.wheel), packed.version, packed.content_hash, metadata, OWNER
            )
    except HttpError as error:
        if error.code == "exists":
            return False
        raise
    lab.blobs.add(packed.wheel.read_bytes())
    lab.blobs.add(packed.source.read_bytes())
    with lab.database.write() as c:
        found = _pending(c, environment, packed.version)
        releases.accept_wheel(
            c, found, releases.check_wheel(lab.blobs, environment, found), packed.wheel.stat().st_size
        )
        releases.announce_source(c, environment, _file(packed.source), packed.version, packed.content_hash, metadata)
        releases.publish(c, lab.blobs, environment, _pending(c, environment, packed.version))
        audit.note(c, OWNER, "environment.publish", f"{environment.slug}@{packed.version}", detail="mettle hub init")
    return True


def _keeper(owner_id: str) -> Caller:
    """Whoever runs the Hub acts for the team."""
    team = teams.Team(owner_id, OWNER, "Mettle", teams.ADMIN, 0.0)
    person = people.Person("", OWNER, "Mettle", "", False, False, 0.0)
    return Caller(person, (team,), roles={owner_id: teams.ADMIN})


def _owner(c: Connection) -> str:
    o = tables.owners.c
    row = c.execute(select(o.id, o.kind).where(o.slug == OWNER)).first()
    owner_id = people.create_owner(c, OWNER, people.TEAM, "Mettle") if row is None else str(row[0])
    if row is not None and row[1] != people.TEAM:
        raise HttpError(409, f"a person is called {OWNER!r}, so the shipped environments have no owner here")
    known = {member.id for member in teams.members_of(c, owner_id)}
    for person in people.list_people(c):
        if person.is_admin and person.id not in known:
            row_of = {"team_id": owner_id, "person_id": person.id, "role": teams.ADMIN, "joined_at": person.created_at}
            c.execute(insert(tables.memberships).values(row_of))
    return owner_id


def _environment(c: Connection, keeper: Caller, owner_id: str, name: str) -> str:
    try:
        return catalogue.find_environment(c, keeper, OWNER, name).id
    except HttpError:
        return catalogue.create_environment(c, owner_id, name, visibility=catalogue.PUBLIC)


def _pending(c: Connection, environment: catalogue.HubEnvironment, version: str) -> releases.Release:
    r = tables.releases.c
    release_id = c.scalar(select(r.id).where(r.environment_id == environment.id, r.version == version))
    return releases.pending_release(c, environment, str(release_id))


def _file(path: Path) -> Announced:
    return Announced(path.name, sha256_file(path), path.stat().st_size)
