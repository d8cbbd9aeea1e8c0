"""Releases of an environment: announced, uploaded, checked, published; then immutable.

A push is six requests, and a kill at any point of it leaves a release that nobody sees and that the next push takes
over. What is announced, wheel and source, is named by its SHA-256; a release is `ready`, and only then seen, when both
are stored and both say that they are of its name and version. Invariant: a version that was once ready never changes,
and its number is not free again when it is deleted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Row, and_, insert, or_, select, update

from mettle.errors import UserError
from mettle.hub import tables
from mettle.hub.accounts.identifiers import digest_of, new_id, new_secret
from mettle.hub.registry.archives import checked_version, read_source, read_wheel, wheel_name_parts
from mettle.hub.registry.catalogue import READY, HubEnvironment, refresh_listing
from mettle.storage.blobs import BlobStore
from mettle.web.problems import HttpError

PENDING: Final = "pending"
DELETED: Final = "deleted"
MAX_BLOB_BYTES: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class Release:
    """One version. Its columns are those of the table."""

    id: str
    environment_id: str
    version: str
    content_hash: str
    state: str
    is_yanked: bool
    yanked_reason: str
    published_by: str
    metadata: dict[str, Any]
    readme: str
    wheel_name: str
    wheel_sha256: str
    wheel_bytes: int
    wheel_key: str
    wheel_metadata: str
    source_name: str
    source_sha256: str
    source_bytes: int
    source_key: str
    card: dict[str, Any] | None
    card_state: str
    card_log: str
    created_at: float


@dataclass(frozen=True, slots=True)
class Announced:
    """A file that is to come."""

    filename: str
    sha256: str
    num_bytes: int


def announce_wheel(
    c: Connection, environment: HubEnvironment, file: Announced, version: str, content_hash: str,
    metadata: dict[str, Any], by: str,
) -> tuple[str, str]:  # fmt: skip
    """Begin a release, or take over one that was begun; returns its id and the secret of its upload's address.

    Raises: HttpError 409 when the version, or the same content, is published already; UserError for a wrong name.
    """
    name, wheel_version = wheel_name_parts(file.filename)
    if (name, wheel_version) != (environment.name, checked_version(version)):
        raise UserError(f"the wheel {file.filename} is not of {environment.name} {version}")
    r = tables.releases.c
    same = or_(r.version == version, and_(r.content_hash == content_hash, r.state == READY))
    known = [
        _release(row) for row in c.execute(select(tables.releases).where(r.environment_id == environment.id, same))
    ]
    _refuse_published(environment, known, version, content_hash)
    secret = new_secret()
    values = {
        "content_hash": content_hash, "metadata": metadata, "published_by": by, "wheel_name": file.filename,
        "wheel_sha256": file.sha256, "wheel_bytes": file.num_bytes, "wheel_key": digest_of(secret),
        "wheel_metadata": "", "source_name": "", "source_sha256": "", "source_bytes": 0, "source_key": "",
        "readme": "", "created_at": time.time(),
    }  # fmt: skip
    if known:
        c.execute(update(tables.releases).where(r.id == known[0].id).values(**values))
        return known[0].id, secret
    release_id = new_id()
    c.execute(
        insert(tables.releases).values(
            id=release_id, environment_id=environment.id, version=version, state=PENDING, is_yanked=False,
            yanked_reason="", card=None, card_state="", card_log="", **values,
        )
    )  # fmt: skip
    return release_id, secret


def announce_source(
    c: Connection,
    environment: HubEnvironment,
    file: Announced,
    version: str,
    content_hash: str,
    metadata: dict[str, Any],
) -> tuple[str, str]:
    """The source of a release whose wheel was checked. Raises: HttpError 409 when there is none."""
    r = tables.releases.c
    row = c.execute(
        select(tables.releases).where(
            r.environment_id == environment.id, r.version == version, r.content_hash == content_hash
        )
    ).first()
    found = None if row is None else _release(row)
    if found is not None:
        _refuse_published(environment, [found], version, content_hash)
    if found is None or not found.wheel_metadata:
        raise HttpError(409, f"send the wheel of {environment.slug} {version} before its source")
    secret = new_secret()
    c.execute(
        update(tables.releases)
        .where(r.id == found.id)
        .values(
            source_name=file.filename[:200], source_sha256=file.sha256, source_bytes=file.num_bytes,
            source_key=digest_of(secret), metadata={**found.metadata, **metadata},
        )
    )  # fmt: skip
    return found.id, secret


def upload_target(c: Connection, secret: str) -> tuple[str, int]:
    """(SHA-256, bytes at most) of what an upload's address takes. Raises: HttpError 404 when it takes nothing."""
    r, digest = tables.releases.c, digest_of(secret)
    row = c.execute(
        select(tables.releases).where(r.state == PENDING, or_(r.wheel_key == digest, r.source_key == digest))
    ).first()
    if row is None:
        raise HttpError(404, "nothing is expected at this address; push again")
    found = _release(row)
    if found.wheel_key == digest:
        return found.wheel_sha256, min(found.wheel_bytes or MAX_BLOB_BYTES, MAX_BLOB_BYTES)
    return found.source_sha256, min(found.source_bytes or MAX_BLOB_BYTES, MAX_BLOB_BYTES)


def pending_release(c: Connection, environment: HubEnvironment, release_id: str) -> Release:
    """Raises: HttpError 404 when there is no such release, 409 when it is published."""
    r = tables.releases.c
    row = c.execute(select(tables.releases).where(r.id == release_id, r.environment_id == environment.id)).first()
    if row is None:
        raise HttpError(404, f"{environment.slug} has no release {release_id[:80]!r} that waits")
    found = _release(row)
    if found.state != PENDING:
        raise HttpError(409, f"{environment.slug} {found.version} is published already")
    return found


def check_wheel(blobs: BlobStore, environment: HubEnvironment, release: Release) -> str:
    """The wheel's METADATA. Raises: HttpError 409 when it has not come, UserError when it is not what was announced."""
    path = _stored(blobs, release.wheel_sha256, "the wheel")
    return read_wheel(path, name=environment.name, version=release.version)


def accept_wheel(c: Connection, release: Release, text: str, num_bytes: int) -> None:
    """Note that the wheel was checked."""
    r = tables.releases.c
    done = c.execute(
        update(tables.releases)
        .where(r.id == release.id, r.state == PENDING, r.wheel_sha256 == release.wheel_sha256)
        .values(wheel_metadata=text, wheel_bytes=num_bytes)
    )
    _one_row(done.rowcount)


def publish(c: Connection, blobs: BlobStore, environment: HubEnvironment, release: Release) -> None:
    """Check the source and make the release seen.

    Raises: HttpError 409 when something has not come, UserError when it is not what was announced.
    """
    if not release.wheel_metadata:
        raise HttpError(409, "the wheel was not checked; push again")
    _stored(blobs, release.wheel_sha256, "the wheel")
    path = _stored(blobs, release.source_sha256, "the source archive")
    source = read_source(path, name=environment.name, version=release.version)
    r, e, now = tables.releases.c, tables.environments.c, time.time()
    readme = source.readme.replace("\0", "\N{REPLACEMENT CHARACTER}")  # PostgreSQL keeps no zero bytes
    done = c.execute(
        update(tables.releases)
        .where(r.id == release.id, r.state == PENDING, r.source_sha256 == release.source_sha256)
        .values(
            state=READY, readme=readme, source_bytes=path.stat().st_size, wheel_key="", source_key="",
            created_at=now, card_state="PENDING",
        )
    )  # fmt: skip
    _one_row(done.rowcount)
    tags = [str(tag)[:40] for tag in source.project.get("tags") or source.project.get("keywords") or []][:20]
    said = str(source.project.get("description") or "")[:500]
    c.execute(
        update(tables.environments).where(e.id == environment.id).values(description=said, tags=tags, updated_at=now)
    )
    refresh_listing(c, environment.id)


def releases_of(c: Connection, environment_id: str) -> list[Release]:
    """Those that are seen, the newest first."""
    r = tables.releases.c
    query = select(tables.releases).where(r.environment_id == environment_id, r.state == READY)
    return [_release(row) for row in c.execute(query.order_by(r.created_at.desc()))]


def find_release(c: Connection, environment: HubEnvironment, wanted: str) -> Release:
    """By version, content hash (or its first 8 digits), or `latest`. Raises: HttpError 404 when there is none."""
    known = releases_of(c, environment.id)
    if wanted == "latest":
        found = next((r for r in known if not r.is_yanked), None) or next(iter(known), None)
    else:
        is_hash = len(wanted) >= 8
        found = next(
            (r for r in known if wanted in (r.version, r.id) or (is_hash and r.content_hash.startswith(wanted))), None
        )
    if found is None:
        has = ", ".join(r.version for r in known[:5]) or "no release yet"
        raise HttpError(404, f"Environment {environment.slug}@{wanted[:64]} not found; it has {has}")
    return found


def find_pair(c: Connection, environment: HubEnvironment, before: str, after: str) -> tuple[Release, Release]:
    """Two releases by what `find_release` takes; `before` empty is the one that `after` followed.

    Raises: HttpError 404 when one of them is not there.
    """
    newer = find_release(c, environment, after)
    if before:
        return find_release(c, environment, before), newer
    known = releases_of(c, environment.id)
    older = next((r for r in known if r.created_at < newer.created_at), None)
    if older is None:
        raise HttpError(404, f"{environment.slug}@{newer.version} is its first version: there is none before it")
    return older, newer


def set_yanked(c: Connection, release: Release, reason: str | None) -> None:
    """Yank with a reason, or take it back (None): pip then installs it only where it is named exactly."""
    values = {"is_yanked": reason is not None, "yanked_reason": (reason or "")[:200]}
    c.execute(update(tables.releases).where(tables.releases.c.id == release.id).values(**values))
    refresh_listing(c, release.environment_id)


def delete_release(c: Connection, release: Release) -> None:
    """Take a version away for good; its number stays taken."""
    values = {"state": DELETED, "readme": "", "wheel_metadata": "", "card": None, "card_log": ""}
    c.execute(update(tables.releases).where(tables.releases.c.id == release.id).values(**values))
    refresh_listing(c, release.environment_id)


def copy_release(c: Connection, release: Release, environment_id: str, by: str) -> str:
    """The same release under another environment, for a fork; returns its id."""
    release_id = new_id()
    values = {name: getattr(release, name) for name in Release.__slots__}
    values |= {"id": release_id, "environment_id": environment_id, "published_by": by, "created_at": time.time()}
    if release.card_state == "RUNNING":  # the check that runs is the other's
        values |= {"card_state": "PENDING", "card_log": ""}
    c.execute(insert(tables.releases).values(**values))
    refresh_listing(c, environment_id)
    return release_id


def blobs_in_use(c: Connection) -> set[str]:
    """Every blob that a release, also one that waits, refers to."""
    r = tables.releases.c
    rows = c.execute(select(r.wheel_sha256, r.source_sha256).where(r.state != DELETED)).all()
    return {str(sha) for row in rows for sha in row if sha}


def _refuse_published(environment: HubEnvironment, known: list[Release], version: str, content_hash: str) -> None:
    for release in known:
        if release.state == READY and release.content_hash == content_hash:
            raise HttpError(
                409, f"content hash {content_hash[:12]} already exists as {environment.slug}@{release.version};"
                " change something and bump the version", code="exists",
            )  # fmt: skip
        if release.version == version and release.state != PENDING:
            raise HttpError(
                409, f"version {version} of {environment.slug} already exists, and versions never change;"
                " bump the version", code="exists",
            )  # fmt: skip


def _stored(blobs: BlobStore, sha256: str, what: str) -> Path:
    if not sha256 or not blobs.has(sha256):
        raise HttpError(409, f"{what} has not come; push again")
    return blobs.path(sha256)


def _one_row(num: int) -> None:
    if num != 1:
        raise HttpError(409, "somebody else pushed the same version meanwhile; push again")


def _release(row: Row[Any]) -> Release:
    return Release(**row._mapping)
