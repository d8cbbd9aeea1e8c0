"""Files into machines and out of them, and snapshots.

Uploads wait in a file of the service until they are complete. What comes out of a machine is held in memory on its way
to the client, so that only `max_transfers` go on at a time.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from mettle.errors import UserError
from mettle.sandbox.machines.files import Snapshot
from mettle.sandbox.service.bodies import Spool, chunks, read_bytes
from mettle.sandbox.service.faults import TooLarge
from mettle.sandbox.service.state import record_of, service_of
from mettle.sandbox.service.wire import pack

FILES_TYPE: Final = "application/x-mettle-files"
_PIECE_BYTES: Final = 1 << 18
_DEFAULT_MODE: Final = 0o644


async def put_file(request: web.Request) -> web.StreamResponse:
    """Write the body to `path`; `mode` is octal. Directories on the way are made."""
    service, machine = service_of(request), record_of(request).machine
    path, mode = _path(request), _mode(request)
    with Spool(service.config.spool_dir) as spool:
        await spool.receive(path, mode, chunks(request, service.config.max_body_mb, service.config.stall_s))
        await machine.upload_files(spool.files)
    return web.json_response({"path": path}, status=201)


async def put_files(request: web.Request) -> web.StreamResponse:
    """Write many files: for each four bytes of length, a JSON header `{"path", "size", "mode"}`, and its bytes."""
    service, machine = service_of(request), record_of(request).machine
    if request.content_type != FILES_TYPE:
        raise UserError(f"many files come as {FILES_TYPE}, not as {request.content_type}; one file by PUT")
    with Spool(service.config.spool_dir) as spool:
        await spool.receive_many(chunks(request, service.config.max_body_mb, service.config.stall_s))
        if spool.files:
            await machine.upload_files(spool.files)
        return web.json_response({"num_files": len(spool.files)}, status=201)


async def get_file(request: web.Request) -> web.StreamResponse:
    """The bytes of `path`, unless they are more than `max_bytes`."""
    service, machine = service_of(request), record_of(request).machine
    path, most = _path(request), service.config.max_body_mb << 20
    try:
        max_bytes = min(most, int(request.query.get("max_bytes", most)))
    except ValueError:
        raise UserError(f"max_bytes is {request.query['max_bytes']!r}; it must be a whole number") from None
    async with service.transfers:
        return await _send(request, await machine.download(path, max_bytes=max_bytes), service.config.stall_s)


async def list_entries(request: web.Request) -> web.StreamResponse:
    """What the directory `path` holds."""
    entries = await record_of(request).machine.list(request.query.get("path", "/work"))
    return web.json_response({"entries": pack(entries)})


async def get_snapshot(request: web.Request) -> web.StreamResponse:
    """The directories `path` (may be given several times) as a tar archive."""
    service, machine = service_of(request), record_of(request).machine
    async with service.transfers:
        snapshot = await machine.snapshot(tuple(request.query.getall("path", ["/work"])))
        if len(snapshot.data) > service.config.max_body_mb << 20:
            raise TooLarge(f"the snapshot has {len(snapshot.data):,} bytes; max_body_mb {service.config.max_body_mb}")
        return await _send(request, snapshot.data, service.config.stall_s)


async def put_snapshot(request: web.Request) -> web.StreamResponse:
    """Put the files of an archive back where they were."""
    service, machine = service_of(request), record_of(request).machine
    async with service.transfers:
        data = await read_bytes(request, service.config.max_body_mb, service.config.stall_s)
        await machine.restore(Snapshot(data, tuple(request.query.getall("path", ["/work"]))))
    return web.json_response({})


async def _send(request: web.Request, data: bytes, stall_s: float) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "application/octet-stream", "Content-Length": str(len(data))}
    )
    await response.prepare(request)
    try:
        for start in range(0, len(data), _PIECE_BYTES):
            async with asyncio.timeout(stall_s):
                await response.write(data[start : start + _PIECE_BYTES])
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client takes no more") from None
    await response.write_eof()
    return response


def _path(request: web.Request) -> str:
    path = request.query.get("path", "")
    if not path or "\0" in path:
        raise UserError("`path` must name a file of the machine, as in ?path=/work/file")
    return path


def _mode(request: web.Request) -> int:
    try:
        return int(request.query.get("mode", oct(_DEFAULT_MODE)[2:]), 8) & 0o777
    except ValueError:
        raise UserError(f"mode is {request.query['mode']!r}; it must be octal, as in 755") from None
