"""The checks of pushes for programs: list, log, and once more. Paths and fields are the field's."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy import Connection

from mettle.hub.access import EnvironmentReader, EnvironmentWriter, LabHere
from mettle.hub.accounts import audit
from mettle.hub.actions import states
from mettle.hub.caller import Caller
from mettle.hub.registry import catalogue, releases
from mettle.hub.registry.catalogue import HubEnvironment
from mettle.hub.registry.releases import Release
from mettle.hub.routes.addresses import iso
from mettle.hub.routes.json_bodies import HubRequest, body_of

router = APIRouter(prefix="/api/v1/environmentshub", tags=["environments"])


class RetryAsked(HubRequest):
    """`action_id` is the id of a release; without one, the newest."""

    action_id: str = "latest"


@router.get("/{owner}/{name}/actions")
def list_actions(
    lab: LabHere, caller: EnvironmentReader, owner: str, name: str, version_id: str = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20, offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
) -> dict[str, Any]:  # fmt: skip
    """The check of each release, the newest first."""
    with lab.database.read() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        found = [r for r in releases.releases_of(c, environment.id) if r.card_state and version_id in ("", r.id)]
    return {"data": {"actions": [_shown(each) for each in found[offset : offset + limit]], "total": len(found)}}


@router.get("/{owner}/{name}/actions/{action_id}/logs")
def action_logs(
    lab: LabHere, caller: EnvironmentReader, owner: str, name: str, action_id: str,
    tail_lines: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> dict[str, Any]:  # fmt: skip
    """What a check has said until now."""
    with lab.database.read() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        release = releases.find_release(c, environment, action_id)
    return {"data": {"logs": "\n".join(release.card_log.splitlines()[-tail_lines:])}}


@router.post("/{owner}/{name}/actions/retry")
def retry_action(
    lab: LabHere, caller: EnvironmentWriter, owner: str, name: str, asked: Annotated[RetryAsked, body_of(RetryAsked)]
) -> dict[str, Any]:
    """Check a release once more."""
    with lab.database.write() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        release = retry_check(c, caller, environment, asked.action_id)
    said = {"success": True, "job_id": release.id, "version_id": release.id}
    return {"data": {**said, "message": f"{environment.slug}@{release.version} is checked again"}}


def retry_check(c: Connection, caller: Caller, environment: HubEnvironment, wanted: str) -> Release:
    """Queue the check of a release again. Raises: HttpError 403 for who does not publish it, 409 while it runs."""
    catalogue.must_push(caller, environment)
    release = releases.find_release(c, environment, wanted)
    states.retry(c, release)
    said = f"{environment.slug}@{release.version}"
    audit.note(c, caller.name, "environment.check", said, address=caller.address)
    return release


def _shown(release: Release) -> dict[str, Any]:
    return {
        "id": release.id, "name": "quality card", "status": release.card_state, "trigger": "push",
        "version": {"semantic_version": release.version, "content_hash": release.content_hash},
        "created_at": iso(release.created_at), "card": release.card,
    }  # fmt: skip
