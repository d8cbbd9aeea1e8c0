"""Secrets and variables for programs: list, set, change, delete. Paths and fields are those of the field.

A secret's value is never answered. Whoever publishes an environment, and each member of a team, sets what is theirs.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import Connection

from mettle.hub.access import EnvironmentWriter, LabHere
from mettle.hub.accounts import audit
from mettle.hub.caller import Caller, owner_of
from mettle.hub.lab import Lab
from mettle.hub.registry import catalogue
from mettle.hub.routes.addresses import iso
from mettle.hub.routes.json_bodies import HubRequest, body_of
from mettle.hub.secrets import store
from mettle.hub.secrets.store import StoredSecret
from mettle.web.problems import HttpError

router = APIRouter(prefix="/api/v1", tags=["secrets"])
Team = Annotated[str, Query(alias="teamId", max_length=64)]


class SecretAsked(HubRequest):
    name: str = Field(max_length=300)
    value: str = Field(max_length=store.MAX_VALUE_BYTES * 2)
    description: str | None = Field(default="", max_length=500)
    isFile: bool = False
    teamId: str | None = None


class SecretChanged(HubRequest):
    value: str | None = Field(default=None, max_length=store.MAX_VALUE_BYTES * 2)
    description: str | None = Field(default=None, max_length=500)


Asked = Annotated[SecretAsked, body_of(SecretAsked)]
Changed = Annotated[SecretChanged, body_of(SecretChanged)]


@router.get("/secrets/")
def list_own(lab: LabHere, caller: EnvironmentWriter, team_id: Team = "") -> dict[str, Any]:
    """Mine, or a team's of mine: what all jobs of that owner are told."""
    with lab.database.read() as c:
        found = store.list_secrets(c, owner_of(caller, team_id), None)
    return {"data": [_shown(lab, each) for each in found]}


@router.post("/secrets/", status_code=201)
def create_own(lab: LabHere, caller: EnvironmentWriter, asked: Asked) -> dict[str, Any]:
    """A new one for all jobs of an owner."""
    return {"data": _put(lab, caller, owner_of(caller, asked.teamId), None, asked, is_variable=False)}


@router.post("/variables/", status_code=201)
def create_own_variable(lab: LabHere, caller: EnvironmentWriter, asked: Asked) -> dict[str, Any]:
    """A new variable for all jobs of an owner."""
    return {"data": _put(lab, caller, owner_of(caller, asked.teamId), None, asked, is_variable=True)}


@router.get("/secrets/{secret_id}")
def read_own(lab: LabHere, caller: EnvironmentWriter, secret_id: str) -> dict[str, Any]:
    """One, without its value."""
    with lab.database.read() as c:
        return {"data": _shown(lab, _mine(c, caller, secret_id))}


@router.patch("/secrets/{secret_id}")
def change_own(lab: LabHere, caller: EnvironmentWriter, secret_id: str, asked: Changed) -> dict[str, Any]:
    """Another value or description."""
    with lab.database.write() as c:
        return {"data": _shown(lab, _change(c, lab, caller, _mine(c, caller, secret_id), asked))}


@router.delete("/secrets/{secret_id}")
def delete_own(lab: LabHere, caller: EnvironmentWriter, secret_id: str) -> dict[str, Any]:
    """Delete it, or a variable."""
    with lab.database.write() as c:
        _delete(c, caller, _mine(c, caller, secret_id))
    return {"success": True}


@router.get("/environmentshub/{environment_id}/{kind}")
def list_of_environment(lab: LabHere, caller: EnvironmentWriter, environment_id: str, kind: str) -> dict[str, Any]:
    """Of an environment: `secrets` or `variables`."""
    with lab.database.read() as c:
        owner_id = _environment_owner(c, caller, environment_id)
        found = store.list_secrets(c, owner_id, environment_id, is_variable=_is_variable(kind))
    return {"data": [_shown(lab, each) for each in found]}


@router.post("/environmentshub/{environment_id}/{kind}", status_code=201)
def create_of_environment(
    lab: LabHere, caller: EnvironmentWriter, environment_id: str, kind: str, asked: Asked
) -> dict[str, Any]:
    """A new one for the jobs of its owner on an environment."""
    with lab.database.read() as c:
        owner_id = _environment_owner(c, caller, environment_id)
    return {"data": _put(lab, caller, owner_id, environment_id, asked, is_variable=_is_variable(kind))}


@router.patch("/environmentshub/{environment_id}/{kind}/{secret_id}")
def change_of_environment(
    lab: LabHere, caller: EnvironmentWriter, environment_id: str, kind: str, secret_id: str, asked: Changed
) -> dict[str, Any]:
    """Another value or description."""
    with lab.database.write() as c:
        found = _of_environment(c, caller, environment_id, kind, secret_id)
        return {"data": _shown(lab, _change(c, lab, caller, found, asked))}


@router.delete("/environmentshub/{environment_id}/{kind}/{secret_id}")
def delete_of_environment(
    lab: LabHere, caller: EnvironmentWriter, environment_id: str, kind: str, secret_id: str
) -> dict[str, Any]:
    """Delete it."""
    with lab.database.write() as c:
        _delete(c, caller, _of_environment(c, caller, environment_id, kind, secret_id))
    return {"success": True}


def _put(
    lab: Lab, caller: Caller, owner_id: str, environment_id: str | None, asked: SecretAsked, *, is_variable: bool
) -> dict[str, Any]:
    value = asked.value
    if asked.isFile:
        try:
            value = base64.b64decode(value, validate=True).decode("utf-8")
        except (binascii.Error, ValueError):
            raise HttpError(422, "a file comes as base64 of UTF-8 text", param="value") from None
    with lab.database.write() as c:
        made = store.put_secret(
            c, lab.vault, owner_id, environment_id, name=asked.name, value=value, is_variable=is_variable,
            description=asked.description or "", is_new=True,
        )  # fmt: skip
        audit.note(c, caller.name, "secret.create", made.name, address=caller.address)
    return _shown(lab, made)


def change_secret(
    c: Connection, lab: Lab, caller: Caller, owner_id: str, environment_id: str | None, fields: dict[str, str]
) -> None:
    """What the forms of pages do: set one, or delete one of the same place."""
    if fields.get("action") == "unsecret":
        found = _mine(c, caller, fields.get("secret_id", ""))
        if (found.owner_id, found.environment_id) != (owner_id, environment_id):
            raise HttpError(404, "it is not of this place")
        _delete(c, caller, found)
        return
    made = store.put_secret(
        c, lab.vault, owner_id, environment_id, name=fields.get("name", ""), value=fields.get("value", ""),
        is_variable=fields.get("is_variable") == "1",
    )  # fmt: skip
    audit.note(c, caller.name, "secret.set", made.name, address=caller.address)


def _change(c: Connection, lab: Lab, caller: Caller, found: StoredSecret, asked: SecretChanged) -> StoredSecret:
    made = store.put_secret(
        c, lab.vault, found.owner_id, found.environment_id, name=found.name,
        value=lab.vault.open(found.sealed, found.id) if asked.value is None else asked.value,
        is_variable=found.is_variable, description=asked.description or found.description,
    )  # fmt: skip
    audit.note(c, caller.name, "secret.change", found.name, address=caller.address)
    return made


def _delete(c: Connection, caller: Caller, found: StoredSecret) -> None:
    store.delete_secret(c, found)
    audit.note(c, caller.name, "secret.delete", found.name, address=caller.address)


def _mine(c: Connection, caller: Caller, secret_id: str) -> StoredSecret:
    found = store.find_secret(c, secret_id)
    if not caller.is_member(found.owner_id):  # not an admin of the Hub either: what it opens is its owner's
        raise HttpError(404, f"Secret {secret_id[:80]} not found")
    return found


def _of_environment(c: Connection, caller: Caller, environment_id: str, kind: str, secret_id: str) -> StoredSecret:
    _environment_owner(c, caller, environment_id)
    found = _mine(c, caller, secret_id)
    if found.environment_id != environment_id or found.is_variable != _is_variable(kind):
        raise HttpError(404, f"this environment has none of the id {secret_id[:80]}")
    return found


def _environment_owner(c: Connection, caller: Caller, environment_id: str) -> str:
    environment = catalogue.environment_by_id(c, caller, environment_id)
    catalogue.must_push(caller, environment)
    return environment.owner_id


def _is_variable(kind: str) -> bool:
    if kind not in ("secrets", "variables"):
        raise HttpError(404, "an environment has secrets and variables")
    return kind == "variables"


def _shown(lab: Lab, found: StoredSecret) -> dict[str, Any]:
    value = {"value": lab.vault.open(found.sealed, found.id)} if found.is_variable else {}
    return {
        "id": found.id, "name": found.name, "source": "environment" if found.environment_id else "global",
        "description": found.description, "isVariable": found.is_variable, "createdAt": iso(found.created_at),
        "updatedAt": iso(found.updated_at), **value,
    }  # fmt: skip
