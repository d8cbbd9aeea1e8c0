"""The registry for programs: list, read, push, fork, star, yank, delete. Paths and fields are those of the field."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field
from sqlalchemy import Connection

from mettle.hub.access import EnvironmentReader, EnvironmentWriter, LabHere
from mettle.hub.accounts import audit, people
from mettle.hub.caller import Caller
from mettle.hub.registry import catalogue, releases
from mettle.hub.registry.archives import list_files, normalized_name, read_member
from mettle.hub.registry.catalogue import HubEnvironment, Order, Wanted
from mettle.hub.registry.differences import difference_of
from mettle.hub.registry.releases import Announced
from mettle.hub.routes.addresses import iso, root_of
from mettle.hub.routes.json_bodies import HubRequest, body_of
from mettle.web.problems import HttpError

router = APIRouter(prefix="/api/v1/environmentshub", tags=["environments"])


class ResolveAsked(HubRequest):
    name: str = Field(max_length=100)
    visibility: str | None = None
    owner_slug: str | None = None
    team_slug: str | None = None
    team_id: str | None = None


class FileAsked(HubRequest):
    content_hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    filename: str = Field(max_length=200)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(default=0, ge=0, le=releases.MAX_BLOB_BYTES)
    semantic_version: str = Field(max_length=60)
    metadata: dict[str, Any] = Field(default_factory=dict)


class LookupAsked(HubRequest):
    id: str = ""
    name: str = ""


class ForkAsked(HubRequest):
    team_slug: str | None = None
    team_id: str | None = None


class ChangeAsked(HubRequest):
    visibility: str


class YankAsked(HubRequest):
    """`reason` null takes a yank back."""

    reason: str | None = Field(default="", max_length=200)


@router.get("/")
def list_environments(
    lab: LabHere, caller: EnvironmentReader, search: str = "", owner: str = "", visibility: str = "",
    tags: Annotated[list[str] | None, Query()] = None, starred_only: bool = False, mine_only: bool = False,
    sort_by: Order | None = None, sort_order: str = "desc",
    limit: Annotated[int, Query(ge=1, le=200)] = 20, offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
) -> dict[str, Any]:  # fmt: skip
    """Those that the caller may see.

    `search` is words and "phrases", looked for in names, descriptions, tags, READMEs and tasks; all must be there. The
    order is by relevance where something is searched for, else the newest first.
    """
    wanted = Wanted(
        search[:200],
        owner,
        visibility,
        tags or (),
        mine_only,
        starred_only,
        sort_by or ("relevance" if search.strip() else "created_at"),
        sort_order != "asc",
        limit,
        offset,
    )
    with lab.database.read() as c:
        found, total = catalogue.list_environments(c, caller, wanted)
    return {"data": [_shown(each) for each in found], "total_count": total}


@router.post("/resolve")
def resolve(
    lab: LabHere, caller: EnvironmentWriter, asked: Annotated[ResolveAsked, body_of(ResolveAsked)]
) -> dict[str, Any]:
    """The environment to push to, made where it is missing. A visibility that is asked for holds from then on."""
    with lab.database.write() as c:
        owner_id, owner = _owner(c, caller, asked.team_id, asked.team_slug or asked.owner_slug)
        name = normalized_name(asked.name)
        known = _known(c, caller, owner, name)
        if known is None:
            visibility = asked.visibility or catalogue.PRIVATE
            environment_id = catalogue.create_environment(c, owner_id, name, visibility=visibility)
            audit.note(
                c, caller.name, "environment.create", f"{owner}/{name}", detail=visibility, address=caller.address
            )
        else:
            environment_id = known.id
            catalogue.must_push(caller, known)
            if asked.visibility is not None:
                _change_visibility(c, caller, known, asked.visibility)
    data = {"id": environment_id, "created": known is None, "owner": {"name": owner}, "name": name}
    return {"data": data}


@router.post("/lookup")
def lookup(
    lab: LabHere, caller: EnvironmentReader, asked: Annotated[LookupAsked, body_of(LookupAsked)]
) -> dict[str, Any]:
    """Whether an id is that of an environment."""
    with lab.database.read() as c:
        return {"data": {"id": catalogue.environment_by_id(c, caller, asked.id).id}}


@router.post("/{environment_id}/wheels")
def announce_wheel(
    request: Request, lab: LabHere, caller: EnvironmentWriter, environment_id: str,
    asked: Annotated[FileAsked, body_of(FileAsked)],
) -> dict[str, Any]:  # fmt: skip
    """Begin a release with its wheel; answers where to PUT the bytes."""
    file = Announced(asked.filename, asked.sha256, asked.size)
    with lab.database.write() as c:
        environment = _to_push(c, caller, environment_id)
        release_id, secret = releases.announce_wheel(
            c, environment, file, asked.semantic_version, asked.content_hash, asked.metadata, caller.name
        )
    return {"data": {"wheel_id": release_id, "upload_url": _upload(request, secret)}}


@router.post("/{environment_id}/wheels/{wheel_id}/finalize")
def finalize_wheel(lab: LabHere, caller: EnvironmentWriter, environment_id: str, wheel_id: str) -> dict[str, Any]:
    """Check the wheel that has come."""
    with lab.database.read() as c:
        environment = _to_push(c, caller, environment_id)
        release = releases.pending_release(c, environment, wheel_id)
    text = releases.check_wheel(lab.blobs, environment, release)
    with lab.database.write() as c:
        releases.accept_wheel(c, release, text, lab.blobs.path(release.wheel_sha256).stat().st_size)
    return {"data": {"success": True}}


@router.post("/{environment_id}/versions")
def announce_source(
    request: Request, lab: LabHere, caller: EnvironmentWriter, environment_id: str,
    asked: Annotated[FileAsked, body_of(FileAsked)],
) -> dict[str, Any]:  # fmt: skip
    """The source archive of a release whose wheel was checked; answers where to PUT the bytes."""
    file = Announced(asked.filename, asked.sha256, asked.size)
    with lab.database.write() as c:
        environment = _to_push(c, caller, environment_id)
        release_id, secret = releases.announce_source(
            c, environment, file, asked.semantic_version, asked.content_hash, asked.metadata
        )
    return {"data": {"version_id": release_id, "upload_url": _upload(request, secret)}}


@router.post("/{environment_id}/versions/{version_id}/finalize")
def finalize_source(lab: LabHere, caller: EnvironmentWriter, environment_id: str, version_id: str) -> dict[str, Any]:
    """Check the source, and publish the release."""
    with lab.database.write() as c:
        environment = _to_push(c, caller, environment_id)
        release = releases.pending_release(c, environment, version_id)
        releases.publish(c, lab.blobs, environment, release)
        said = f"{environment.slug}@{release.version}"
        audit.note(c, caller.name, "environment.publish", said, detail=release.content_hash, address=caller.address)
    return {"data": {"success": True, "message": f"published {said}"}}


@router.get("/{owner}/{name}/versions")
def list_versions(lab: LabHere, caller: EnvironmentReader, owner: str, name: str) -> dict[str, Any]:
    """The releases, the newest first."""
    with lab.database.read() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        found = releases.releases_of(c, environment.id)
    rows = [
        {
            "version": r.version, "created_at": iso(r.created_at), "sha256": r.content_hash, "size": 2,
            "is_yanked": r.is_yanked, "yanked_reason": r.yanked_reason, "published_by": r.published_by,
        } for r in found
    ]  # fmt: skip
    return {"data": {"versions": rows}}


@router.get("/{owner}/{name}/status")
def status(lab: LabHere, caller: EnvironmentReader, owner: str, name: str) -> dict[str, Any]:
    """The newest release, and what the checks of its push said."""
    with lab.database.read() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        newest = next(iter(releases.releases_of(c, environment.id)), None)
    latest = newest and {
        "semantic_version": newest.version, "content_hash": newest.content_hash, "created_at": iso(newest.created_at)
    }  # fmt: skip
    action = {"status": newest.card_state, "job_id": newest.id} if newest and newest.card_state else None
    shown = {"name": environment.name, "description": environment.description, "visibility": environment.visibility}
    return {"data": {**shown, "latest_version": latest, "action": action}}


@router.get("/{owner}/{name}/@{version}")
def read_release(
    request: Request, lab: LabHere, caller: EnvironmentReader, owner: str, name: str, version: str
) -> dict[str, Any]:
    """One release with the addresses of its files."""
    with lab.database.read() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        release = releases.find_release(c, environment, version)
    root = root_of(request)
    files = f"{root}/packages/{environment.owner}/{environment.name}/{release.version}"
    index = f"{root}/owners/{environment.owner}/simple/"
    shown = {
        "semantic_version": release.version, "content_hash": release.content_hash, "sha256": release.wheel_sha256,
        "metadata": {**release.metadata, "description": environment.description, "tags": environment.tags},
        "wheel_url": f"{files}/{release.wheel_name}", "package_url": f"{files}/source.tar.gz",
        "tracked_package_url": f"{files}/source.tar.gz", "source_sha256": release.source_sha256,
        "url_dependencies": [d for d in release.metadata.get("dependencies") or [] if " @ " in str(d)],
        "is_yanked": release.is_yanked, "yanked_reason": release.yanked_reason, "card": release.card,
        "card_state": release.card_state,
    }  # fmt: skip
    # pip asks an index without a token, so that one of a private environment would only be a 404 to it.
    is_open = environment.visibility == catalogue.PUBLIC
    shown |= {"simple_index_url": index if is_open else None, "install_index_url": index if is_open else None}
    return {"data": {**_shown(environment), **shown}}


@router.get("/{owner}/{name}/@{version}/inspect")
def inspect(
    lab: LabHere, caller: EnvironmentReader, owner: str, name: str, version: str, path: str = "",
    max_bytes: Annotated[int, Query(ge=1, le=1 << 20)] = 100_000,
) -> dict[str, Any]:  # fmt: skip
    """A folder or a file of the source."""
    with lab.database.read() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        release = releases.find_release(c, environment, version)
    source, path = lab.blobs.path(release.source_sha256), path.strip("/")
    found = read_member(source, path, max_bytes) if path else None
    if found is not None:
        shown = {"kind": "file", "content": found[0].decode("utf-8", "replace"), "truncated": found[1] > max_bytes}
        return {"data": {**shown, "path": path, "version_id": release.id, "total_bytes": found[1]}}
    entries: dict[str, dict[str, Any]] = {}
    for file in list_files(source):
        if path and not file.path.startswith(f"{path}/"):
            continue
        first, _, rest = file.path.removeprefix(f"{path}/" if path else "").partition("/")
        entry = {"name": first, "path": f"{path}/{first}".strip("/"), "is_directory": bool(rest)}
        entries.setdefault(first, {**entry, "size": 0})["size"] += file.num_bytes
    if path and not entries:
        raise HttpError(404, f"{environment.slug}@{release.version} has no file {path[:200]!r}")
    listed = {"kind": "directory", "entries": list(entries.values()), "truncated": False}
    return {"data": {**listed, "path": path, "version_id": release.id}}


@router.get("/{owner}/{name}/difference")
def difference(
    lab: LabHere, caller: EnvironmentReader, owner: str, name: str, before: str = "", after: str = "latest"
) -> dict[str, Any]:
    """What differs between the sources of two versions; without `before`, from the one that `after` followed."""
    with lab.database.read() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        old, new = releases.find_pair(c, environment, before, after)
    found = difference_of(lab.blobs.path(old.source_sha256), lab.blobs.path(new.source_sha256))
    return {"data": {"before": old.version, "after": new.version, **found.to_dict()}}


@router.delete("/{owner}/{name}")
def delete_environment(lab: LabHere, caller: EnvironmentWriter, owner: str, name: str) -> dict[str, Any]:
    """Delete an environment with its releases."""
    with lab.database.write() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        catalogue.must_govern(caller, environment)
        catalogue.delete_environment(c, environment)
        audit.note(c, caller.name, "environment.delete", environment.slug, address=caller.address)
    return {"success": True}


@router.delete("/{owner}/{name}/@{version}")
def delete_release(lab: LabHere, caller: EnvironmentWriter, owner: str, name: str, version: str) -> dict[str, Any]:
    """Delete one release; its number is not free again."""
    with lab.database.write() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        catalogue.must_govern(caller, environment)
        release = releases.find_release(c, environment, version)
        releases.delete_release(c, release)
        said = f"{environment.slug}@{release.version}"
        audit.note(c, caller.name, "environment.delete", said, address=caller.address)
    return {"success": True}


@router.patch("/{owner}/{name}")
def change(
    lab: LabHere, caller: EnvironmentWriter, owner: str, name: str, asked: Annotated[ChangeAsked, body_of(ChangeAsked)]
) -> dict[str, Any]:
    """Who may see it."""
    with lab.database.write() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        catalogue.must_govern(caller, environment)
        _change_visibility(c, caller, environment, asked.visibility)
    return {"success": True}


@router.post("/{owner}/{name}/@{version}/yank")
def yank(
    lab: LabHere, caller: EnvironmentWriter, owner: str, name: str, version: str,
    asked: Annotated[YankAsked, body_of(YankAsked)],
) -> dict[str, Any]:  # fmt: skip
    """Yank a release, so that pip takes it only where it is named exactly; or take that back."""
    with lab.database.write() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        catalogue.must_push(caller, environment)
        release = releases.find_release(c, environment, version)
        releases.set_yanked(c, release, asked.reason)
        said = f"{environment.slug}@{release.version}"
        audit.note(c, caller.name, "environment.yank", said, detail=asked.reason or "", address=caller.address)
    return {"success": True}


@router.post("/{owner}/{name}/fork")
def fork(
    lab: LabHere, caller: EnvironmentWriter, owner: str, name: str, asked: Annotated[ForkAsked, body_of(ForkAsked)]
) -> dict[str, Any]:
    """A copy of the newest release under another owner."""
    with lab.database.write() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        release = releases.find_release(c, environment, "latest")
        owner_id, slug = _owner(c, caller, asked.team_id, asked.team_slug)
        if _known(c, caller, slug, environment.name) is not None:
            raise HttpError(409, f"{slug}/{environment.name} already exists")
        said = f"{environment.slug}@{release.version}"
        environment_id = catalogue.create_environment(c, owner_id, environment.name, forked_from=said)
        release_id = releases.copy_release(c, release, environment_id, caller.name)
        audit.note(
            c, caller.name, "environment.fork", f"{slug}/{environment.name}", detail=said, address=caller.address
        )
    made = {"environment_id": environment_id, "version_id": release_id, "name": environment.name, "owner": slug}
    return {"data": {"success": True, "message": f"forked {said}", **made, "slug": f"{slug}/{environment.name}"}}


@router.put("/{owner}/{name}/star")
def star(lab: LabHere, caller: EnvironmentWriter, owner: str, name: str) -> dict[str, Any]:
    """Star it."""
    return _star(lab, caller, owner, name, is_starred=True)


@router.delete("/{owner}/{name}/star")
def unstar(lab: LabHere, caller: EnvironmentWriter, owner: str, name: str) -> dict[str, Any]:
    """Take the star back."""
    return _star(lab, caller, owner, name, is_starred=False)


def _star(lab: LabHere, caller: Caller, owner: str, name: str, *, is_starred: bool) -> dict[str, Any]:
    with lab.database.write() as c:
        catalogue.set_star(c, caller, catalogue.find_environment(c, caller, owner, name), is_starred)
    return {"success": True}


def _shown(environment: HubEnvironment) -> dict[str, Any]:
    return {
        "id": environment.id, "name": environment.name, "owner": {"name": environment.owner},
        "description": environment.description, "visibility": environment.visibility, "tags": environment.tags,
        "latest_version": environment.version or None, "stars": environment.stars,
        "downloads": environment.num_downloads, "forked_from": environment.forked_from or None,
        "created_at": iso(environment.created_at), "updated_at": iso(environment.updated_at),
    }  # fmt: skip


def _owner(c: Connection, caller: Caller, team_id: str | None, slug: str | None) -> tuple[str, str]:
    """(id, slug) of whom something is made for: a team of the caller's, or the caller."""
    assert caller.person is not None, "the route is for people who are signed in"
    if not team_id and slug in (None, "", caller.person.slug):
        return caller.person.id, caller.person.slug
    team = next((t for t in caller.teams if t.id == team_id or (not team_id and t.slug == slug)), None)
    if team is None:
        who = people.find_person(c, slug or "")
        what = f"publish for {slug!r}" if who else f"are in no team {(slug or team_id or '')[:60]!r}"
        raise HttpError(403, f"you {'do not ' if who else ''}{what}")
    return team.id, team.slug


def _known(c: Connection, caller: Caller, owner: str, name: str) -> HubEnvironment | None:
    try:
        return catalogue.find_environment(c, caller, owner, name)
    except HttpError:
        return None


def _to_push(c: Connection, caller: Caller, environment_id: str) -> HubEnvironment:
    environment = catalogue.environment_by_id(c, caller, environment_id)
    catalogue.must_push(caller, environment)
    return environment


def _change_visibility(c: Connection, caller: Caller, environment: HubEnvironment, visibility: str) -> None:
    wanted = catalogue.checked_visibility(visibility)
    if wanted == environment.visibility:
        return
    catalogue.must_govern(caller, environment)
    catalogue.set_visibility(c, environment, wanted)
    audit.note(c, caller.name, "environment.visibility", environment.slug, detail=wanted, address=caller.address)


def _upload(request: Request, secret: str) -> str:
    return f"{root_of(request)}/api/v1/uploads/{secret}"
