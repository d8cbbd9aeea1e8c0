"""Files into machines and out of them, and snapshots.

Uploads wait in a file of the service until they are complete. What comes out of a machine is held in memory on its way
to the client, so that only `max_transfers` go on at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mettle.errors import UserError
from mettle.sandbox.machines.files import Snapshot
from mettle.sandbox.service.answers import bytes_answer, json_answer
from mettle.sandbox.service.bodies import Query
from mettle.sandbox.service.faults import TooLarge
from mettle.sandbox.service.messages import FILES_TYPE
from mettle.sandbox.service.state import record_of, service_of
from mettle.sandbox.service.uploads import Spool, upload_chunks
from mettle.sandbox.service.wire import pack
from mettle.web import bodies

_DEFAULT_MODE: Final = "644"


class FileQuery(Query):
    path: Annotated[str, Field(pattern=r"^[^\x00]+$")]
    mode: str = _DEFAULT_MODE
    max_bytes: int | None = None


async def put_file(request: Request) -> Response:
    """Write the body to `path`; `mode` is octal. Directories on the way are made."""
    service, machine, query = service_of(request), record_of(request).machine, FileQuery.read(request)
    mode = _mode(query.mode)
    with Spool(service.config.spool_dir) as spool:
        await spool.receive(query.path, mode, upload_chunks(request))
        await machine.upload_files(spool.files)
    return json_answer({"path": query.path}, status=201)


async def put_files(request: Request) -> Response:
    """Write many files: for each four bytes of length, a JSON header `{"path", "size", "mode"}`, and its bytes."""
    service, machine = service_of(request), record_of(request).machine
    given = request.headers.get("content-type", "nothing")
    if given != FILES_TYPE:
        raise UserError(f"many files come as {FILES_TYPE}, not as {given}; one file by PUT")
    with Spool(service.config.spool_dir) as spool:
        await spool.receive_many(upload_chunks(request))
        if spool.files:
            await machine.upload_files(spool.files)
        return json_answer({"num_files": len(spool.files)}, status=201)


async def get_file(request: Request) -> Response:
    """The bytes of `path`, unless they are more than `max_bytes`."""
    machine, query = record_of(request).machine, FileQuery.read(request)
    most = service_of(request).config.max_body_mb << 20
    max_bytes = most if query.max_bytes is None else min(most, query.max_bytes)
    return await send_bytes(request, machine.download(query.path, max_bytes=max_bytes))


async def list_entries(request: Request) -> Response:
    """What the directory `path` holds."""
    entries = await record_of(request).machine.list(request.query_params.get("path", "/work"))
    return json_answer({"entries": pack(entries)})


async def get_snapshot(request: Request) -> Response:
    """The directories `path` (may be given several times) as a tar archive."""
    machine, most_mb = record_of(request).machine, service_of(request).config.max_body_mb

    async def taken() -> bytes:
        data = (await machine.snapshot(_paths(request))).data
        if len(data) > most_mb << 20:
            raise TooLarge(f"the snapshot has {len(data):,} bytes; max_body_mb {most_mb}")
        return data

    return await send_bytes(request, taken())


async def put_snapshot(request: Request) -> Response:
    """Put the files of an archive back where they were."""
    service, machine = service_of(request), record_of(request).machine
    config = service.config
    async with service.transfers:
        data = await bodies.read_body(request, max_bytes=config.max_body_mb << 20, stall_s=config.stall_s)
        await machine.restore(Snapshot(data, _paths(request)))
    return json_answer({})


async def send_bytes(request: Request, making: Awaitable[bytes]) -> Response:
    """One of `max_transfers`, until all of it has been sent."""
    service = service_of(request)
    await service.transfers.acquire()
    try:
        data = await making
    except BaseException:
        service.transfers.release()
        raise
    return bytes_answer(data, service.config.stall_s, service.transfers.release)


def _paths(request: Request) -> tuple[str, ...]:
    return tuple(request.query_params.getlist("path")) or ("/work",)


def _mode(text: str) -> int:
    try:
        return int(text, 8) & 0o777
    except ValueError:
        raise UserError(f"mode is {text!r}; it must be octal, as in 755") from None
