"""Clients that say that they are still there, or that they go."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from mettle.errors import UserError
from mettle.sandbox.machines.endings import EndCause, EndReason
from mettle.sandbox.service.answers import json_answer
from mettle.sandbox.service.bodies import LeaseBody, read_body
from mettle.sandbox.service.machines import MachineRecord
from mettle.sandbox.service.routes.status import load
from mettle.sandbox.service.state import SandboxService, client_of, holder_of, service_of


async def keep_alive(request: Request) -> Response:
    """Say that the client is still there; hear which of its machines are not.

    `abandoned` are the keys of creations whose answer the client never got: their machines end.
    """
    service, holder, client = service_of(request), holder_of(request), client_of(request)
    if not client:
        raise UserError("a lease needs the header Mettle-Client")
    for key in (await read_body(request, LeaseBody)).abandoned:
        task = service.idempotent.forget(f"{holder.name}/create/{key}")
        if task is not None:
            task.add_done_callback(lambda done: _end_abandoned(service, done))
    service.register.sweep()
    return json_answer(
        {
            "lease_s": service.config.lease_s,
            "load": load(service),
            "machines": [record.id for record in service.register.of_client(holder.name, client)],
            "ended": service.register.ended_of_client(holder.name, client),
        }
    )


def _end_abandoned(service: SandboxService, task: asyncio.Task[MachineRecord]) -> None:
    if task.cancelled() or task.exception() is not None:
        return
    why = EndReason("its client never learned of it", EndCause.LEFT)
    ending = asyncio.create_task(service.register.delete(task.result(), why))
    service.endings.add(ending)
    ending.add_done_callback(service.endings.discard)


async def leave(request: Request) -> Response:
    """Say that the client is going: its machines end."""
    service, holder, client = service_of(request), holder_of(request), client_of(request)
    chosen = service.register.of_client(holder.name, client) if client else []
    await service.register.delete_all(chosen, EndReason("its client left", EndCause.LEFT))
    return json_answer({"deleted": [record.id for record in chosen]})
