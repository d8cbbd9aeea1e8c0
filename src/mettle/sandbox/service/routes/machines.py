"""Machines made, listed and ended."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mettle.errors import UserError
from mettle.sandbox.service.answers import json_answer
from mettle.sandbox.service.bodies import MachineBody, Query, SelectionBody, read_body
from mettle.sandbox.service.machines import MachineRecord
from mettle.sandbox.service.state import client_of, holder_of, key_of, known_record_of, service_of

_MAX_NAME = 100


async def create(request: Request) -> Response:
    """Make a machine. With an idempotency key, the same request gives the same machine."""
    service, holder, client = service_of(request), holder_of(request), client_of(request)
    body = await read_body(request, MachineBody)
    config = body.config()

    async def make() -> MachineRecord:
        return await service.register.create(holder, client, config, name=body.name[:_MAX_NAME])

    record = await service.idempotent.run(key_of(request, "create"), repr(body), make)
    report = service.seen(record.machine.isolation)
    return json_answer({**record.as_dict(), "isolation": report}, status=201)


class PageQuery(Query):
    limit: int = 100
    status: str | None = None
    cursor: str | None = None


async def list_machines(request: Request) -> Response:
    """A page of the token's machines, oldest first: `label=name=value` (several: all of them), `status`, `limit`."""
    register, query = service_of(request).register, PageQuery.read(request)
    labels = dict(text.partition("=")[::2] for text in request.query_params.getlist("label"))
    register.sweep()
    found, cursor = register.page(holder_of(request), labels, query.status, query.limit, query.cursor)
    return json_answer({"machines": [record.as_dict() for record in found], "next_cursor": cursor})


async def show(request: Request) -> Response:
    """One machine, also for a while after it has ended."""
    record = known_record_of(request)
    return json_answer({**record.as_dict(), "isolation": service_of(request).seen(record.machine.isolation)})


async def delete(request: Request) -> Response:
    """End a machine. One that has ended already is no mistake."""
    record = known_record_of(request)
    await service_of(request).register.delete(record)
    return json_answer(record.as_dict())


async def delete_many(request: Request) -> Response:
    """End machines by `ids`, or by `labels`, or all with `all`."""
    register, body = service_of(request).register, await read_body(request, SelectionBody)
    if not body.ids and not body.labels and not body.is_all:
        raise UserError('nothing was chosen: give "ids", "labels", or "all": true')
    chosen = register.select(holder_of(request), body.labels, "running")
    if body.ids:
        chosen = [record for record in chosen if record.id in set(body.ids)]
    await register.delete_all(chosen)
    return json_answer({"deleted": [record.id for record in chosen]})
