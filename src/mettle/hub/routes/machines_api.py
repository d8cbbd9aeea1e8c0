"""What joined machines ask, each with its own secret, and the list of them for people.

A machine reaches the Hub and never the other way round. It reads and writes what its leases are of, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import Field

import mettle
from mettle.hub.access import LabHere, TrainingReader
from mettle.hub.accounts import audit
from mettle.hub.evaluating.outcome import keep_to_quota
from mettle.hub.machines import fleet, lending, shown
from mettle.hub.machines.fleet import JoinedMachine
from mettle.hub.machines.holdings import inputs_of, open_stored, receive, work_folder
from mettle.hub.machines.leases import renew
from mettle.hub.machines.work_files import MAX_PIECE_BYTES, Mode
from mettle.hub.routes.json_bodies import HubRequest, body_of
from mettle.web.bodies import read_body
from mettle.web.doors import bearer
from mettle.web.problems import HttpError

router = APIRouter(prefix="/api/v1/compute", tags=["machines"])
_READ_BYTES = 1 << 20


class JoinRequest(HubRequest):
    """`digest` is the SHA-256 of the secret that the machine has made and keeps."""

    token: str = Field(min_length=1, max_length=200)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    version: str = Field(max_length=100)
    facts: dict[str, Any] = Field(default_factory=dict)


class BeatRequest(HubRequest):
    """`leases` are those that the machine works on; others of its are given to somebody else."""

    version: str = Field(max_length=100)
    leases: list[str] = Field(default_factory=list, max_length=100)
    is_asking: bool = False
    facts: dict[str, Any] | None = None


class EndRequest(HubRequest):
    """The exit code of the work's process."""

    code: int = Field(ge=-(1 << 15), le=1 << 15)


class LeaveRequest(HubRequest):
    """`is_over`: what it has is given to others, instead of being finished."""

    is_over: bool = False


def machine_here(request: Request, lab: LabHere) -> JoinedMachine:
    """Raises: HttpError 401 for who is no machine of this Hub."""
    secret = bearer(request.headers)
    with lab.database.read() as c:
        found = fleet.machine_of(c, secret) if secret.startswith(fleet.SECRET_PREFIX) else None
    if found is None:
        raise HttpError(
            401, "this is for machines that have joined, and this secret is of none: it was removed, or never was",
            code="unknown_machine", headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
    return found


Machine = Annotated[JoinedMachine, Depends(machine_here)]


async def _piece(request: Request) -> bytes:
    return await read_body(request, max_bytes=MAX_PIECE_BYTES)


@router.get("/machines")
def machines(lab: LabHere, caller: TrainingReader) -> dict[str, Any]:
    """The machines that have joined: what each has, when it was last heard of, and what it does."""
    return {"machines": [each.to_dict() for each in shown.fleet_for(lab, caller)], "version": mettle.__version__}


@router.post("/join", status_code=201)
def join(request: Request, lab: LabHere, asked: Annotated[JoinRequest, body_of(JoinRequest)]) -> dict[str, Any]:
    """Let a machine in; asking again with the same token and digest answers the same."""
    address = request.client.host if request.client else ""
    lab.limits.challenges.take(address, "attempts to join from this address")
    with lab.database.write() as c:
        made = fleet.join(c, asked.token, asked.digest, asked.version, asked.facts, address)
        if made.state != fleet.ACTIVE:
            fleet.set_state(c, made.id, fleet.ACTIVE)
        audit.note(c, f"machine {made.name}"[:100], "machine.join", made.name, detail=made.id, address=address)
    return {"machine_id": made.id, "name": made.name, "lease_s": lab.lease_s}


@router.post("/beat")
def beat(
    request: Request, lab: LabHere, machine: Machine, asked: Annotated[BeatRequest, body_of(BeatRequest)]
) -> dict[str, Any]:
    """Say what it works on; hear what becomes of that, and get work."""
    fleet.must_be_this_release(asked.version)
    address = request.client.host if request.client else ""
    return lending.hear(
        lab, machine, asked.leases, is_asking=asked.is_asking, facts=asked.facts, address=address
    ).to_dict()


@router.post("/back")
def come_back(request: Request, lab: LabHere, machine: Machine) -> dict[str, Any]:
    """Take work again after it has left."""
    with lab.database.write() as c:
        fleet.set_state(c, machine.id, fleet.ACTIVE)
        audit.note(c, f"machine {machine.name}"[:100], "machine.back", machine.name)
    return {"machine_id": machine.id, "name": machine.name, "lease_s": lab.lease_s}


@router.post("/leave")
def leave(
    request: Request, lab: LabHere, machine: Machine, asked: Annotated[LeaveRequest, body_of(LeaveRequest)]
) -> dict[str, Any]:
    """Get no more work."""
    address = request.client.host if request.client else ""
    state = lending.leave(lab, machine, is_over=asked.is_over, actor=f"machine {machine.name}"[:100], address=address)
    return {"state": state}


@router.get("/leases/{lease_id}/files/{path:path}")
def stored(lab: LabHere, machine: Machine, lease_id: str, path: str) -> StreamingResponse:
    """A file of leased work as it is stored."""
    with lending.held_alone(lab, machine, lease_id) as (_, job):
        opened = ExitStack()
        file = opened.enter_context(open_stored(work_folder(lab, job), path))
    return _streamed(file, opened)


@router.get("/leases/{lease_id}/inputs/{path:path}")
def needed(lab: LabHere, machine: Machine, lease_id: str, path: str) -> StreamingResponse:
    """A file of the model that leased work is of."""
    with lending.held_alone(lab, machine, lease_id) as (_, job):
        found = inputs_of(job).get(path)
    if found is None:
        raise HttpError(404, f"this work needs no {path[:200]!r}")
    file = found.open("rb")
    return _streamed(file, file)


@router.put("/leases/{lease_id}/files/{path:path}")
def hand_in(
    lab: LabHere, machine: Machine, lease_id: str, path: str, data: Annotated[bytes, Depends(_piece)],
    offset: Annotated[int, Query(ge=0, le=1 << 40)], size: Annotated[int, Query(ge=0, le=1 << 40)],
    mode: Mode = "whole",
) -> dict[str, Any]:  # fmt: skip
    """A piece of a file of leased work."""
    with lending.held_alone(lab, machine, lease_id) as (lease, job):
        is_whole = receive(work_folder(lab, job), path, data, offset=offset, size=size, mode=mode)
        with lab.database.write() as c:
            renew(c, lab, lease)
    if is_whole and path.endswith(".db"):
        keep_to_quota(lab, job)
    return {"is_whole": is_whole}


@router.post("/leases/{lease_id}/end")
def end(
    lab: LabHere, machine: Machine, lease_id: str, asked: Annotated[EndRequest, body_of(EndRequest)]
) -> dict[str, Any]:
    """The work's process has ended, and all of its files were handed in."""
    lending.end_work(lab, machine, lease_id, asked.code)
    return {"state": "ENDED"}


@router.post("/leases/{lease_id}/back")
def back(lab: LabHere, machine: Machine, lease_id: str) -> dict[str, Any]:
    """The work was not done; it waits for whoever takes it."""
    lending.give_back(lab, machine, lease_id)
    return {"state": "BACK"}


def _streamed(file: BinaryIO, opened: AbstractContextManager[object]) -> StreamingResponse:
    def pieces() -> Iterator[bytes]:
        with opened:
            while piece := file.read(_READ_BYTES):
                yield piece

    return StreamingResponse(pieces(), media_type="application/octet-stream")
