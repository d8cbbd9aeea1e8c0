"""The data plane of the `prime` clients: commands and files of one sandbox, with a pass for that one alone."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

from aiohttp import BodyPartReader, web

from mettle.errors import UserError
from mettle.sandbox.service import faults
from mettle.sandbox.service.bodies import Spool, read_json, seconds, take, texts
from mettle.sandbox.service.state import record_of, service_of
from mettle.sandbox.service.tokens import Holder, digest

PREFIX: Final = "/gw/"


async def execute(request: web.Request) -> web.StreamResponse:
    """Run a shell command; over its time it is a 408."""
    service, machine = service_of(request), record_of(request).machine
    body = await read_json(request, service.config.max_json_mb, service.config.stall_s)
    timeout_s = seconds(body, "timeout", 300.0)
    result = await machine.exec(
        take(body, "command", str, ""),
        cwd=take(body, "working_dir", str, "") or "/work",
        env=texts(body, "env"),
        timeout_s=timeout_s,
        max_output_bytes=10 << 20,
    )
    if result.is_timed_out:
        return web.json_response({"detail": f"the command was not done after {timeout_s:g} s"}, status=408)
    code = 137 if result.exit_code is None else result.exit_code
    return web.json_response({"stdout": result.stdout, "stderr": result.stderr, "exit_code": code})


async def upload(request: web.Request) -> web.StreamResponse:
    """A multipart form with the field `file`, to `path`."""
    service, machine, path = service_of(request), record_of(request).machine, request.query.get("path", "")
    most = service.config.max_body_mb << 20
    if (request.content_length or 0) > most:
        raise faults.TooLarge(f"the upload is over {service.config.max_body_mb} MB")
    if not path or not request.content_type.startswith("multipart/"):
        raise UserError("an upload is a multipart form with the field `file`, and names ?path=")
    with Spool(service.config.spool_dir) as spool:
        async for part in await request.multipart():
            if isinstance(part, BodyPartReader) and part.name == "file":
                await spool.receive(path, 0o644, _pieces(part, most))
        if path not in spool.files:
            raise UserError("the form has no field `file`")
        size = _size(spool, path)
        await machine.upload_files(spool.files)
    return web.json_response({"success": True, "path": path, "size": size, "timestamp": datetime.now(UTC).isoformat()})


async def download(request: web.Request) -> web.StreamResponse:
    """A file's bytes."""
    service = service_of(request)
    async with service.transfers:
        data = await record_of(request).machine.download(
            request.query.get("path", ""), max_bytes=service.config.max_body_mb << 20
        )
        return web.Response(body=data, content_type="application/octet-stream")


async def read_file(request: web.Request) -> web.StreamResponse:
    """A window of a text file; a negative offset counts from its end."""
    service, query = service_of(request), request.query
    async with service.transfers:
        data = await record_of(request).machine.download(
            query.get("path", ""), max_bytes=service.config.max_body_mb << 20
        )
    try:
        offset, length = int(query.get("offset", 0)), int(query.get("length", len(data)))
    except ValueError:
        raise UserError("offset and length must be whole numbers") from None
    start = max(0, len(data) + offset) if offset < 0 else offset
    window = data[start : start + max(0, length)]
    rest = {"total_size": len(data), "offset": start, "truncated": len(window) < len(data)}
    return web.json_response({"content": window.decode(errors="replace"), "size": len(window), **rest})


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ROUTES: Final[list[tuple[str, str, Handler]]] = [
    ("POST", f"{PREFIX}{{space}}/{{id}}/exec", execute),
    ("POST", f"{PREFIX}{{space}}/{{id}}/upload", upload),
    ("GET", f"{PREFIX}{{space}}/{{id}}/download", download),
    ("GET", f"{PREFIX}{{space}}/{{id}}/read-file", read_file),
]


def gateway_holder(request: web.Request) -> Holder | None:
    """Who came with a pass for this sandbox; None for requests to other routes."""
    if not request.path.startswith(PREFIX):
        return None
    token = request.headers.get("Authorization", "").partition(" ")[2].strip()
    service = service_of(request)
    given = service.passes.get(digest(token))
    if given is not None and service.config.unix is None and not service.tokens.knows(given.holder.name):
        raise faults.TokenRefused("the token that this pass was given for has been revoked")
    if given is None or given.machine_id != request.match_info.get("id") or given.expires < time.time():
        raise faults.TokenRefused("this pass is not for this sandbox, or has expired")
    return given.holder


async def _pieces(part: BodyPartReader, most: int) -> AsyncIterator[bytes]:
    num_bytes = 0
    while piece := await part.read_chunk(1 << 18):
        num_bytes += len(piece)
        if num_bytes > most:
            raise faults.TooLarge(f"the upload is over {most >> 20} MB")
        yield piece


def _size(spool: Spool, path: str) -> int:
    held = spool.files[path]
    return held.stat().st_size if not isinstance(held, bytes | str) else len(held)
