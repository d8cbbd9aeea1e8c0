"""Commands: run and waited for, streamed as they print, or in the background.

A streamed answer is one JSON object a line: `{"stdout": base64}`, `{"stderr": base64}`, `{}` now and then to say that
the service is still there, and at last `{"result": {...}}` or `{"error": {...}}`. Invariant: a client that hangs up
before the end of a command (not of a job) takes the command along.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from aiohttp import web

from mettle.errors import UserError
from mettle.sandbox.machines.commands import ExecResult
from mettle.sandbox.protocols import Job, Machine
from mettle.sandbox.service.bodies import read_json, seconds, take, take_bytes, texts
from mettle.sandbox.service.faults import describe
from mettle.sandbox.service.state import KEY_HEADER, SandboxService, holder_of, record_of, service_of
from mettle.sandbox.service.wire import pack

HEARTBEAT_S: Final = 15.0
_MAX_WAIT_S: Final = 60.0


async def execute(request: web.Request) -> web.StreamResponse:
    """Run a command and answer with its result, or with its output as it comes."""
    service, machine = service_of(request), record_of(request).machine
    body = await read_json(request, service.config.max_json_mb, service.config.stall_s)
    order, mode = _order(service, body, 30.0), take(body, "stream", str, "no")
    if mode not in ("no", "result", "chunks"):
        raise UserError(f"stream is {mode!r}; it must be no, result or chunks")
    started = time.monotonic()
    try:
        if mode == "no":
            return web.json_response(_result(await machine.exec(**order)))
        lines = _chunks(machine, order) if mode == "chunks" else _only_result(machine, order)
        return await _answer_in_lines(request, lines, service.config.stall_s)
    finally:
        service.metrics.times["exec_seconds"].add(time.monotonic() - started)


async def start_job(request: web.Request) -> web.StreamResponse:
    """Run a command in the background."""
    service, record = service_of(request), record_of(request)
    body = await read_json(request, service.config.max_json_mb, service.config.stall_s)
    order = _order(service, body, None)

    async def start() -> str:
        return record.add_job(await record.machine.start(**order))

    key = request.headers.get(KEY_HEADER)
    scoped = f"{holder_of(request).name}/{record.id}/{key}" if key else None
    name = await service.idempotent.run(scoped, json.dumps(body, sort_keys=True), start)
    return web.json_response({"id": name}, status=201)


async def list_jobs(request: web.Request) -> web.StreamResponse:
    """The jobs of a machine, oldest first."""
    record = service_of(request).register.find(holder_of(request), request.match_info["id"])
    jobs = [{"id": name, "is_running": job.poll() is None} for name, job in record.jobs.items()]
    return web.json_response({"jobs": jobs})


async def show_job(request: web.Request) -> web.StreamResponse:
    """A job's result, if it has one, and with `output=1` what it has written so far; `wait_s` waits for the result."""
    service = service_of(request)
    job = _job(request)
    try:
        wait_s = min(_MAX_WAIT_S, max(0.0, float(request.query.get("wait_s", 0))))
    except ValueError:
        raise UserError(f"wait_s is {request.query['wait_s']!r}; it must be a number") from None
    result = job.poll()
    if result is None and wait_s:
        result = await _wait_unless_closing(service, job, wait_s)
    shown: dict[str, Any] = {"id": request.match_info["job"], "result": result and pack(result)}
    if request.query.get("output") == "1":
        shown |= (await job.output())._asdict()
    return web.json_response(shown)


async def kill_job(request: web.Request) -> web.StreamResponse:
    """End a job."""
    return web.json_response({"result": pack(await _job(request).kill())})


def _job(request: web.Request) -> Job:
    record = service_of(request).register.find(holder_of(request), request.match_info["id"])
    if record.ended is not None and request.match_info["job"] not in record.jobs:
        record_of(request)  # says why the machine, and the job with it, has ended
    return record.job(request.match_info["job"])


async def _wait_unless_closing(service: SandboxService, job: Job, wait_s: float) -> ExecResult | None:
    """In short turns, so that a service that is told to end is not held up."""
    deadline = time.monotonic() + wait_s
    while True:
        left_s = deadline - time.monotonic()
        result = await job.wait(max(0.0, min(1.0, left_s)))
        if result is not None or left_s <= 1.0 or service.is_closing:
            return result


def _order(service: SandboxService, body: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
    """The arguments of a command. Raises: UserError."""
    command: Any = body.get("command")
    is_list = isinstance(command, list) and all(isinstance(word, str) for word in command)
    if not command or not (is_list or isinstance(command, str)):
        raise UserError("command must be a string for `sh -c`, or a list of strings; it is empty or something else")
    most = service.config.max_output_mb << 20
    max_output = take(body, "max_output_bytes", int, 1 << 20)
    if not 0 <= max_output <= most:
        raise UserError(f"max_output_bytes is {max_output}; it must be from 0 to {most}")
    return {
        "command": command,
        "cwd": take(body, "cwd", str, "/work"),
        "env": texts(body, "env"),
        "stdin": take_bytes(body, "stdin"),
        "timeout_s": seconds(body, "timeout_s", timeout_s),
        "max_output_bytes": max_output,
    }


def _result(result: ExecResult) -> dict[str, Any]:
    packed: dict[str, Any] = pack(result)
    del packed["$record"]
    return packed


async def _only_result(machine: Machine, order: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    yield {"result": pack(await machine.exec(**order))}


async def _chunks(machine: Machine, order: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    async with machine.stream(**order) as stream:
        async for chunk in stream:
            yield {chunk.stream: base64.b64encode(chunk.data).decode()}
        yield {"result": pack(stream.result)}


async def _answer_in_lines(
    request: web.Request, lines: AsyncGenerator[dict[str, Any], None], stall_s: float
) -> web.StreamResponse:
    """Send what comes, and a sign of life when nothing does; a client that takes nothing is hung up on."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
    await response.prepare(request)

    async def send(line: dict[str, Any]) -> None:
        async with asyncio.timeout(stall_s):
            await response.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await send({})

    beating = asyncio.create_task(beat(), name="command heartbeat")
    try:
        async for line in lines:
            await send(line)
    except (TimeoutError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client takes no more") from None
    except Exception as error:
        await send({"error": describe(error)})
    finally:
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await beating
        await lines.aclose()
    await response.write_eof()
    return response
