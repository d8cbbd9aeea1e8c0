"""The sandbox calls of the open-source `prime` clients, of the first era and of today, answered by the same machines.

Control plane below /api/v1/sandbox, with the account's token; data plane below /gw, with a pass for one sandbox that
`auth` gives out. An image is the backend's matter, which has it or refuses; GPUs and a network, which these machines do
not have, are accepted and described as absent.
Statuses, fields and errors are those that the clients read; `docs/reference/sandbox-api.md` lists the calls.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from mettle.errors import UserError
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.endings import EndCause, MachineLost, cause_of
from mettle.sandbox.service import faults
from mettle.sandbox.service.answers import ServiceProblem, described_error, headers_of, json_answer
from mettle.sandbox.service.bodies import PrimePortBody, PrimeSandboxBody, PrimeSelectionBody, Query, read_body
from mettle.sandbox.service.exposures import Exposure
from mettle.sandbox.service.machines import MachineRecord
from mettle.sandbox.service.routes import prime_gateway
from mettle.sandbox.service.state import Pass, client_of, holder_of, known_record_of, record_of, service_of
from mettle.sandbox.service.tokens import digest
from mettle.web.server import url_of

_CONTROL: Final = "/api/v1/sandbox"
_PASS_S: Final = 3600.0
_MOST_MEMORY_MB: Final = 8192
_MOST_DISK_MB: Final = 2048
_IDLE_START: Final = ("tail -f /dev/null", "sleep infinity")
_OWN_IMAGE: Final = "python:3.11-slim"
"""Said of machines for which none was asked; the clients want a name there."""
_MAX_BATCH: Final = 500
_MAX_PASSES: Final = 32  # of one sandbox; a new one ends the oldest


async def create(request: Request) -> Response:
    """Make a sandbox; `idempotency_key` as there."""
    service, holder, client = service_of(request), holder_of(request), client_of(request)
    body = await read_body(request, PrimeSandboxBody)
    config = _config(body)
    shown = {
        "start_command": body.start_command[:4096] or None,
        "cpu_cores": body.cpu_cores,
        "vm": body.vm,
    }

    async def make() -> MachineRecord:
        made = await service.register.create(holder, client, config, name=body.name[:100], extra=shown)
        start = body.start_command.strip()
        if start and start not in _IDLE_START:
            made.add_job(await made.machine.start(start))
        return made

    key = f"{holder.name}/sandbox/{body.idempotency_key}" if body.idempotency_key else None
    record = await service.idempotent.run(key, repr(body), make)
    return json_answer(_describe(record), status=201)


class SandboxQuery(Query):
    page: int = 1
    per_page: int = 50
    status: str | None = None
    is_active: str = ""


async def list_sandboxes(request: Request) -> Response:
    """A page of them: `page`, `per_page`, `labels`, `status`, `is_active`."""
    register, query = service_of(request).register, SandboxQuery.read(request)
    page, per_page = max(1, query.page), min(1000, max(1, query.per_page))
    register.sweep()
    labels = dict.fromkeys(request.query_params.getlist("labels"), "")
    found = [_describe(record) for record in register.select(holder_of(request), labels)]
    wanted = query.status.upper() if query.status else "RUNNING" if query.is_active == "true" else None
    found = [shown for shown in found if wanted in (None, shown["status"])]
    start = (page - 1) * per_page
    rest = len(found) > start + per_page
    shown_page = {"sandboxes": found[start : start + per_page], "total": len(found), "page": page}
    return json_answer({**shown_page, "per_page": per_page, "has_next": rest, "perPage": per_page, "hasNext": rest})


async def get_sandbox(request: Request) -> Response:
    """One of them, also after it has ended."""
    return json_answer(_describe(known_record_of(request)))


async def delete_sandbox(request: Request) -> Response:
    """End one."""
    await service_of(request).register.delete(known_record_of(request))
    return json_answer({"success": True, "message": "deleted"})


async def delete_sandboxes(request: Request) -> Response:
    """End several, by `sandbox_ids` or `labels`."""
    register, holder = service_of(request).register, holder_of(request)
    body = await read_body(request, PrimeSelectionBody)
    ids, labels = body.sandbox_ids[:_MAX_BATCH], body.labels
    if not ids and not labels:
        raise UserError("give sandbox_ids or labels")
    chosen = {record.id: record for record in register.select(holder, dict.fromkeys(labels, ""), "running")}
    missing = [one for one in ids if one not in chosen]
    if ids:
        chosen = {one: chosen[one] for one in ids if one in chosen}
    await register.delete_all(chosen.values())
    failed = [{"sandbox_id": one, "error": "not found"} for one in missing]
    message = f"{len(chosen)} deleted"
    return json_answer({"succeeded": list(chosen), "failed": failed, "message": message})


async def statuses(request: Request) -> Response:
    """How several are."""
    register, holder = service_of(request).register, holder_of(request)
    found: list[dict[str, Any]] = []
    missing: list[dict[str, str]] = []
    for one in (await read_body(request, PrimeSelectionBody)).sandbox_ids[:_MAX_BATCH]:
        try:
            shown = _describe(register.find(holder, one))
        except faults.NoMachine as error:
            missing.append({"sandbox_id": one, "code": "NOT_FOUND", "message": str(error)})
            continue
        problem = {"error_type": shown["errorType"], "error_message": shown["errorMessage"]}
        found.append({"sandbox_id": one, "status": shown["status"], **problem, "pending_image_build_id": None})
    return json_answer({"statuses": found, "errors": missing})


async def give_pass(request: Request) -> Response:
    """A pass for the data plane."""
    service, record = service_of(request), record_of(request)
    now = time.time()
    own = [key for key, one in service.passes.items() if one.machine_id == record.id]
    stale = [key for key, one in service.passes.items() if one.expires < now]
    for key in {*stale, *own[: 1 - _MAX_PASSES]}:
        del service.passes[key]
    token, expires = secrets.token_urlsafe(32), now + _PASS_S
    service.passes[digest(token)] = Pass(holder_of(request), record.id, expires)
    return json_answer(
        {
            "gateway_url": f"{service.config.public_url or _own_url(request)}/gw",
            "user_ns": "m",
            "job_id": record.id,
            "token": token,
            "expires_at": _iso(expires),
            "is_vm": bool(record.extra.get("vm")),
        }
    )


def _own_url(request: Request) -> str:
    """The address of this end of the connection. The Host header is the caller's word, and is not repeated."""
    host, port = request.scope["server"]
    return f"{request.url.scheme}://{host}" if port is None else url_of(host, port, request.url.scheme)


async def error_context(request: Request) -> Response:
    """Why one has ended."""
    shown = _describe(known_record_of(request))
    return json_answer({name: shown[name] for name in ("status", "errorType", "errorMessage")})


async def logs(request: Request) -> Response:
    """What the start command has written."""
    job = next(iter(known_record_of(request).jobs.values()), None)
    output = await job.output() if job is not None else None
    return json_answer({"logs": output.stdout + output.stderr if output is not None else ""})


async def expose(request: Request) -> Response:
    """Open a port to others."""
    service, record = service_of(request), record_of(request)
    body = await read_body(request, PrimePortBody)
    made = await service.exposures.add(record, body.port, body.name or "", body.protocol.upper())
    return json_answer(_described_port(request, made), status=201)


async def list_ports(request: Request) -> Response:
    """The open ports of a sandbox."""
    found = service_of(request).exposures.of(known_record_of(request))
    return json_answer({"exposures": [_described_port(request, each) for each in found]})


async def list_all_ports(request: Request) -> Response:
    """Those of all sandboxes."""
    service = service_of(request)
    records = service.register.select(holder_of(request), {}, "running")
    found = [each for record in records for each in service.exposures.of(record)]
    return json_answer({"exposures": [_described_port(request, each) for each in found]})


async def unexpose(request: Request) -> Response:
    """Close one."""
    await service_of(request).exposures.remove(known_record_of(request), request.path_params["port"])
    return json_answer({"success": True, "message": "closed"})


def _described_port(request: Request, exposure: Exposure) -> dict[str, Any]:
    own = urlsplit(service_of(request).config.public_url or _own_url(request)).hostname or ""
    endpoint = urlsplit(url_of(own, exposure.outer_port)).netloc
    return {
        "exposure_id": exposure.id,
        "sandbox_id": exposure.record.id,
        "port": exposure.port,
        "name": exposure.name or None,
        "url": f"{'http' if exposure.protocol == 'HTTP' else 'tcp'}://{endpoint}",
        "tls_socket": "",
        "protocol": exposure.protocol,
        "external_port": exposure.outer_port,
        "external_endpoint": endpoint,
        "created_at": _iso(exposure.created),
    }


Handler = Callable[[Request], Awaitable[Response]]
ROUTES: Final[list[tuple[str, str, Handler]]] = [
    ("POST", _CONTROL, create),
    ("GET", _CONTROL, list_sandboxes),
    ("DELETE", _CONTROL, delete_sandboxes),
    ("POST", f"{_CONTROL}/status:batchGet", statuses),
    ("GET", f"{_CONTROL}/expose/all", list_all_ports),
    ("GET", f"{_CONTROL}/{{id}}", get_sandbox),
    ("DELETE", f"{_CONTROL}/{{id}}", delete_sandbox),
    ("POST", f"{_CONTROL}/{{id}}/auth", give_pass),
    ("GET", f"{_CONTROL}/{{id}}/error-context", error_context),
    ("GET", f"{_CONTROL}/{{id}}/logs", logs),
    ("POST", f"{_CONTROL}/{{id}}/expose", expose),
    ("GET", f"{_CONTROL}/{{id}}/expose", list_ports),
    ("DELETE", f"{_CONTROL}/{{id}}/expose/{{port}}", unexpose),
    *prime_gateway.ROUTES,
]


def problem_of(error: Exception, request: HTTPConnection) -> ServiceProblem | None:
    """The error as these clients read it; None on routes that are not theirs."""
    path: str = request.scope["path"]
    is_gateway = path.startswith(prime_gateway.PREFIX)
    if not is_gateway and path != _CONTROL and not path.startswith(_CONTROL + "/"):
        return None
    described = described_error(error)
    kind, message = described["type"], described["message"]
    if is_gateway and isinstance(error, MachineLost | faults.NoMachine):
        return ServiceProblem(502, kind, {"error": "sandbox_not_found", "detail": message}, {})
    is_missing = isinstance(error, FileNotFoundError | MachineLost)
    status = 404 if is_missing else faults.status_of(described)
    return ServiceProblem(status, kind, {"detail": message, "error": kind}, headers_of(error))


def _config(body: PrimeSandboxBody) -> MachineConfig:
    config = MachineConfig(
        memory_mb=min(_MOST_MEMORY_MB, int(body.memory_gb * 1024)),
        disk_mb=min(_MOST_DISK_MB, int(body.disk_size_gb * 1024)),
        max_processes=256,
        lifetime_s=_seconds(body.timeout_minutes),
        idle_s=_seconds(body.idle_timeout_minutes),
        env={**body.environment_vars, **body.secrets},
        labels=dict.fromkeys(body.labels, ""),
        image=body.docker_image or None,
    )
    config.limits()
    return config


def _seconds(minutes: int | None) -> float | None:
    """A negative number of minutes is no limit."""
    return None if minutes is None or minutes < 0 else minutes * 60.0


def _describe(record: MachineRecord) -> dict[str, Any]:
    config, asked = record.machine.config, record.extra
    created, is_vm = _iso(record.created), bool(asked.get("vm"))
    is_running, is_over = record.ended is None, cause_of(record.why) is EndCause.LIFETIME
    status = "RUNNING" if is_running else "TIMEOUT" if is_over else "TERMINATED"
    return {
        "id": record.id,
        "name": record.name or record.id,
        "dockerImage": config.image or _OWN_IMAGE,
        "startCommand": None if is_vm else asked.get("start_command"),  # of a "vm" the clients read no string there
        "cpuCores": asked.get("cpu_cores", 1.0),
        "memoryGB": config.memory_mb / 1024,
        "diskSizeGB": config.disk_mb / 1024,
        "diskMountPath": "/work",
        "gpuCount": 0,
        "gpuType": None,
        "vm": is_vm,
        "networkAccess": False,
        "status": status,
        "timeoutMinutes": round(config.lifetime_s / 60) if config.lifetime_s else -1,
        "environmentVars": {name: "***" for name in config.env},
        "secrets": None,
        "advancedConfigs": None,
        "labels": list(config.labels),
        "createdAt": created,
        "updatedAt": _iso(record.ended or record.created),
        "startedAt": created,
        "terminatedAt": _iso(record.ended) if record.ended is not None else None,
        "exitCode": None,
        "errorType": None if is_running else "TIMEOUT" if is_over else "TERMINATED",
        "errorMessage": record.why or None,
        "userId": record.owner,
        "teamId": None,
        "kubernetesJobId": None,
        "region": None,
        "registryCredentialsId": None,
    }


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat().replace("+00:00", "Z")
