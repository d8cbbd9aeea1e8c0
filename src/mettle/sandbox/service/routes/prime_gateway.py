"""The data plane of the `prime` clients: commands and files of one sandbox, with a pass for that one alone."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from mettle.errors import SandboxError, UserError
from mettle.sandbox.machines.commands import CommandSpec
from mettle.sandbox.machines.endings import MachineLost
from mettle.sandbox.protocols import Machine
from mettle.sandbox.service import connect_rpc, faults
from mettle.sandbox.service.answers import TimedAnswer, json_answer
from mettle.sandbox.service.bodies import PrimeCommandBody, read_body
from mettle.sandbox.service.routes.files import FileQuery, send_bytes
from mettle.sandbox.service.state import SandboxService, record_of, service_of
from mettle.sandbox.service.tokens import Holder, digest
from mettle.sandbox.service.uploads import Spool, upload_chunks
from mettle.web import bodies

PREFIX: Final = "/gw/"
_PIECE_BYTES: Final = 1 << 18
_MAX_RESULT_BYTES: Final = 10 << 20


async def execute(request: Request) -> Response:
    """Run a shell command; over its time it is a 408."""
    machine, body = record_of(request).machine, await read_body(request, PrimeCommandBody)
    result = await machine.exec(
        body.command,
        cwd=body.working_dir or "/work",
        env=body.env,
        timeout_s=body.timeout,
        max_output_bytes=_MAX_RESULT_BYTES,
    )
    if result.is_timed_out:
        return json_answer({"detail": f"the command was not done after {body.timeout:g} s"}, status=408)
    code = 137 if result.exit_code is None else result.exit_code
    return json_answer({"stdout": result.stdout, "stderr": result.stderr, "exit_code": code})


async def start_session(request: Request) -> Response:
    """Run a command of a Connect stream (`connect_rpc`), whose last envelope says what went wrong."""
    service, stall_s = service_of(request), service_of(request).config.stall_s
    headers = {"connect-accept-encoding": "identity"}
    try:
        machine = record_of(request).machine
        body = await bodies.read_body(request, max_bytes=service.config.max_json_mb << 20, stall_s=stall_s)
        told = connect_rpc.read_start(body)
        timeout_ms = request.headers.get("connect-timeout-ms", "")
        timeout_s = int(timeout_ms) / 1000 if timeout_ms.isascii() and timeout_ms.isdigit() else None
        spec = CommandSpec.make(told.argv, told.cwd or "/work", told.env, None, timeout_s, _MAX_RESULT_BYTES)
    except (MachineLost, faults.NoMachine) as error:
        return Response(connect_rpc.last("not_found", str(error)), 200, headers, connect_rpc.CONTENT_TYPE)
    except UserError as error:
        return Response(connect_rpc.last("invalid_argument", str(error)), 200, headers, connect_rpc.CONTENT_TYPE)
    return TimedAnswer(_session(machine, spec), stall_s, connect_rpc.CONTENT_TYPE, headers=headers)


async def _session(machine: Machine, spec: CommandSpec) -> AsyncGenerator[bytes, None]:
    yield connect_rpc.started(1)
    try:
        async with machine.stream_command(spec) as stream:
            async for chunk in stream:
                yield connect_rpc.output(chunk.stream, chunk.data)
        result = stream.result
        assert result is not None, "the stream has ended"
        if result.is_timed_out:
            yield connect_rpc.last("deadline_exceeded", f"the command was not done after {spec.timeout_s:g} s")
            return
        yield connect_rpc.ended(137 if result.exit_code is None else result.exit_code)
        yield connect_rpc.last()
    except (SandboxError, OSError, UserError) as error:
        yield connect_rpc.last("not_found" if isinstance(error, MachineLost) else "internal", str(error))


async def upload(request: Request) -> Response:
    """A multipart form with the field `file`, to `path`."""
    machine, query = record_of(request).machine, FileQuery.read(request)
    if not request.headers.get("content-type", "").startswith("multipart/"):
        raise UserError("an upload is a multipart form with the field `file`, and names ?path=")
    try:
        form = await MultiPartParser(request.headers, upload_chunks(request)).parse()  # type: ignore[arg-type]
    except MultiPartException as error:
        raise UserError(f"the form cannot be read: {error.message}") from None
    except OSError as error:
        raise faults.own_disk(error) from error
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise UserError("the form has no field `file`")
        with Spool(service_of(request).config.spool_dir) as spool:
            await spool.receive(query.path, 0o644, _pieces(file))
            await machine.upload_files(spool.files)
    finally:
        await form.close()
    now = datetime.now(UTC).isoformat()
    return json_answer({"success": True, "path": query.path, "size": file.size, "timestamp": now})


async def download(request: Request) -> Response:
    """A file's bytes."""
    most = service_of(request).config.max_body_mb << 20
    return await send_bytes(request, record_of(request).machine.download(FileQuery.read(request).path, max_bytes=most))


class WindowQuery(FileQuery):
    offset: int = 0
    length: int | None = None


async def read_file(request: Request) -> Response:
    """A window of a text file; a negative offset counts from its end."""
    service, query = service_of(request), WindowQuery.read(request)
    async with service.transfers:
        data = await record_of(request).machine.download(query.path, max_bytes=service.config.max_body_mb << 20)
    start = max(0, len(data) + query.offset) if query.offset < 0 else query.offset
    window = data[start : start + max(0, len(data) if query.length is None else query.length)]
    rest = {"total_size": len(data), "offset": start, "truncated": len(window) < len(data)}
    return json_answer({"content": window.decode(errors="replace"), "size": len(window), **rest})


Handler = Callable[[Request], Awaitable[Response]]
ROUTES: Final[list[tuple[str, str, Handler]]] = [
    ("POST", f"{PREFIX}{{space}}/{{id}}/exec", execute),
    ("POST", f"{PREFIX}{{space}}/{{id}}/command_session.CommandSession/Start", start_session),
    ("POST", f"{PREFIX}{{space}}/{{id}}/upload", upload),
    ("GET", f"{PREFIX}{{space}}/{{id}}/download", download),
    ("GET", f"{PREFIX}{{space}}/{{id}}/read-file", read_file),
]


def gateway_holder(service: SandboxService, request: HTTPConnection) -> Holder | None:
    """Who came with a pass for this sandbox; None for requests to other routes."""
    path: str = request.scope["path"]
    if not path.startswith(PREFIX):
        return None
    machine_id = path.removeprefix(PREFIX).split("/")[1:2]
    token = request.headers.get("Authorization", "").partition(" ")[2].strip()
    given = service.passes.get(digest(token))
    if given is not None and service.config.unix is None and not service.tokens.knows(given.holder.name):
        raise faults.TokenRefused("the token that this pass was given for has been revoked")
    if given is None or [given.machine_id] != machine_id or given.expires < time.time():
        raise faults.TokenRefused("this pass is not for this sandbox, or has expired")
    return given.holder


async def _pieces(file: UploadFile) -> AsyncIterator[bytes]:
    while piece := await file.read(_PIECE_BYTES):
        yield piece
