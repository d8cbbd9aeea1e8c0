"""Commands: run and waited for, streamed as they print, or in the background.

A streamed answer is one JSON object a line: `{"stdout": base64}`, `{"stderr": base64}`, `{}` now and then to say that
the service is still there, and at last `{"result": {...}}` or `{"error": {...}}`. Invariant: a client that hangs up
before the end of a command (not of a job) takes the command along.
"""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mettle.sandbox.machines.commands import CommandSpec, ExecResult, Job
from mettle.sandbox.protocols import Machine
from mettle.sandbox.service.answers import json_answer, lines_answer
from mettle.sandbox.service.bodies import CommandBody, JobBody, Query, read_body
from mettle.sandbox.service.state import SandboxService, key_of, known_record_of, record_of, service_of
from mettle.sandbox.service.wire import pack

_MAX_WAIT_S: Final = 60.0


async def execute(request: Request) -> Response:
    """Run a command and answer with its result, or with its output as it comes."""
    service, machine = service_of(request), record_of(request).machine
    body = await read_body(request, CommandBody)
    spec, started = body.spec(service.config.max_output_mb), time.monotonic()

    def note_time() -> None:
        service.metrics.add_time("exec_seconds", time.monotonic() - started)

    if body.stream == "no":
        try:
            return json_answer(_result(await machine.exec_command(spec)))
        finally:
            note_time()
    lines = _chunks(machine, spec) if body.stream == "chunks" else _only_result(machine, spec)
    return lines_answer(lines, service.config.stall_s, note_time)


async def start_job(request: Request) -> Response:
    """Run a command in the background."""
    service, record = service_of(request), record_of(request)
    body = await read_body(request, JobBody)
    spec = body.spec(service.config.max_output_mb)

    async def start() -> str:
        return record.add_job(await record.machine.start_command(spec))

    name = await service.idempotent.run(key_of(request, record.id), repr(body), start)
    return json_answer({"id": name}, status=201)


async def list_jobs(request: Request) -> Response:
    """The jobs of a machine, oldest first."""
    jobs = known_record_of(request).jobs
    return json_answer({"jobs": [{"id": name, "is_running": job.poll() is None} for name, job in jobs.items()]})


class JobQuery(Query):
    wait_s: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    output: str = ""


async def show_job(request: Request) -> Response:
    """A job's result, if it has one, and with `output=1` what it has written so far; `wait_s` waits for the result."""
    job, query = _job(request), JobQuery.read(request)
    wait_s = min(_MAX_WAIT_S, max(0.0, query.wait_s))
    result = job.poll()
    if result is None and wait_s:
        result = await _wait_unless_closing(service_of(request), job, wait_s)
    shown: dict[str, Any] = {"id": request.path_params["job"], "result": result and pack(result)}
    if query.output == "1":
        shown |= (await job.output())._asdict()
    return json_answer(shown)


async def kill_job(request: Request) -> Response:
    """End a job."""
    return json_answer({"result": pack(await _job(request).kill())})


def _job(request: Request) -> Job:
    record, name = known_record_of(request), request.path_params["job"]
    if record.ended is not None and name not in record.jobs:
        record_of(request)  # says why the machine, and the job with it, has ended
    return record.job(name)


async def _wait_unless_closing(service: SandboxService, job: Job, wait_s: float) -> ExecResult | None:
    """In short turns, so that a service that is told to end is not held up."""
    deadline = time.monotonic() + wait_s
    while True:
        left_s = deadline - time.monotonic()
        result = await job.wait(max(0.0, min(1.0, left_s)))
        if result is not None or left_s <= 1.0 or service.is_closing:
            return result


def _result(result: ExecResult) -> dict[str, Any]:
    packed: dict[str, Any] = pack(result)
    del packed["$record"]
    return packed


async def _only_result(machine: Machine, spec: CommandSpec) -> AsyncGenerator[dict[str, Any], None]:
    yield {"result": pack(await machine.exec_command(spec))}


async def _chunks(machine: Machine, spec: CommandSpec) -> AsyncGenerator[dict[str, Any], None]:
    async with machine.stream_command(spec) as stream:
        async for chunk in stream:
            yield {chunk.stream: base64.b64encode(chunk.data).decode()}
        yield {"result": pack(stream.result)}
