"""The sandbox calls of the open-source `prime` clients of the first era, answered by the same machines.

Control plane below /api/v1/sandbox, with the account's token; data plane below /gw, with a pass for one sandbox that
`auth` gives out. What these machines do not have (images, GPUs, a network) is accepted and described as what it is.
Statuses, fields and errors are those that the clients read; `docs/reference/sandbox-api.md` lists the calls.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final

from aiohttp import web

from mettle.errors import UserError
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.endings import EndCause, MachineLost, cause_of
from mettle.sandbox.service import faults, gateway
from mettle.sandbox.service.bodies import read_json, take, texts
from mettle.sandbox.service.machines import MachineRecord
from mettle.sandbox.service.state import Pass, client_of, holder_of, record_of, service_of
from mettle.sandbox.service.tokens import digest

_CONTROL: Final = "/api/v1/sandbox"
_PASS_S: Final = 3600.0
_MOST_MEMORY_MB: Final = 8192
_MOST_DISK_MB: Final = 2048
_IDLE_START: Final = ("tail -f /dev/null", "sleep infinity")
_MAX_BATCH: Final = 500
_MAX_PASSES: Final = 32  # of one sandbox; a new one ends the oldest


async def create(request: web.Request) -> web.StreamResponse:
    """Make a sandbox; `idempotency_key` as there."""
    service, holder = service_of(request), holder_of(request)
    body = await _body(request)
    config = _config(body)
    shown = {
        "docker_image": take(body, "docker_image", str, "")[:300],
        "start_command": take(body, "start_command", str, "")[:4096] or None,
        "cpu_cores": _figure(body, "cpu_cores", 1.0),
    }

    async def make() -> MachineRecord:
        made = await service.register.create(
            holder, client_of(request), config, name=take(body, "name", str, "sandbox")[:100], extra=shown
        )
        start = body.get("start_command")
        if isinstance(start, str) and start.strip() and start.strip() not in _IDLE_START:
            made.add_job(await made.machine.start(start))
        return made

    key = body.get("idempotency_key")
    record = await service.idempotent.run(
        f"{holder.name}/sandbox/{key}" if key else None, json.dumps(body, sort_keys=True), make
    )
    return web.json_response(_describe(record), status=201)


async def list_sandboxes(request: web.Request) -> web.StreamResponse:
    """A page of them: `page`, `per_page`, `labels`, `status`, `is_active`."""
    register, query = service_of(request).register, request.query
    try:
        page, per_page = max(1, int(query.get("page", 1))), min(1000, max(1, int(query.get("per_page", 50))))
    except ValueError:
        raise UserError("page and per_page must be whole numbers") from None
    register.sweep()
    labels = dict.fromkeys(query.getall("labels", []), "")
    found = [_describe(record) for record in register.select(holder_of(request), labels)]
    if "status" in query:
        found = [shown for shown in found if shown["status"] == query["status"].upper()]
    elif query.get("is_active") == "true":
        found = [shown for shown in found if shown["status"] == "RUNNING"]
    start = (page - 1) * per_page
    rest = len(found) > start + per_page
    shown_page = {"sandboxes": found[start : start + per_page], "total": len(found), "page": page}
    return web.json_response(
        {**shown_page, "per_page": per_page, "has_next": rest, "perPage": per_page, "hasNext": rest}
    )


async def get_sandbox(request: web.Request) -> web.StreamResponse:
    """One of them, also after it has ended."""
    return web.json_response(_describe(_known(request)))


async def delete_sandbox(request: web.Request) -> web.StreamResponse:
    """End one."""
    await service_of(request).register.delete(_known(request))
    return web.json_response({"success": True, "message": "deleted"})


async def delete_sandboxes(request: web.Request) -> web.StreamResponse:
    """End several, by `sandbox_ids` or `labels`."""
    register, holder = service_of(request).register, holder_of(request)
    body = await _body(request)
    ids = [str(one) for one in take(body, "sandbox_ids", list, [])][:_MAX_BATCH]
    labels = [str(one) for one in take(body, "labels", list, [])]
    if not ids and not labels:
        raise UserError("give sandbox_ids or labels")
    chosen = {record.id: record for record in register.select(holder, dict.fromkeys(labels, ""), "running")}
    missing = [one for one in ids if one not in chosen]
    if ids:
        chosen = {one: chosen[one] for one in ids if one in chosen}
    await register.delete_all(chosen.values())
    failed = [{"sandbox_id": one, "error": "not found"} for one in missing]
    message = f"{len(chosen)} deleted"
    return web.json_response({"succeeded": list(chosen), "failed": failed, "message": message})


async def statuses(request: web.Request) -> web.StreamResponse:
    """How several are."""
    register, holder = service_of(request).register, holder_of(request)
    found: list[dict[str, Any]] = []
    missing: list[dict[str, str]] = []
    for one in take(await _body(request), "sandbox_ids", list, [])[:_MAX_BATCH]:
        try:
            shown = _describe(register.find(holder, str(one)))
        except faults.NoMachine as error:
            missing.append({"sandbox_id": str(one), "code": "NOT_FOUND", "message": str(error)})
            continue
        problem = {"error_type": shown["errorType"], "error_message": shown["errorMessage"]}
        found.append({"sandbox_id": one, "status": shown["status"], **problem, "pending_image_build_id": None})
    return web.json_response({"statuses": found, "errors": missing})


async def give_pass(request: web.Request) -> web.StreamResponse:
    """A pass for the data plane."""
    service, record = service_of(request), record_of(request)
    now = time.time()
    own = [key for key, one in service.passes.items() if one.machine_id == record.id]
    stale = [key for key, one in service.passes.items() if one.expires < now]
    for key in {*stale, *own[: 1 - _MAX_PASSES]}:
        del service.passes[key]
    token, expires = secrets.token_urlsafe(32), now + _PASS_S
    service.passes[digest(token)] = Pass(holder_of(request), record.id, expires)
    return web.json_response(
        {
            "gateway_url": f"{request.scheme}://{request.host}/gw",
            "user_ns": "m",
            "job_id": record.id,
            "token": token,
            "expires_at": _iso(expires),
            "is_vm": False,
        }
    )


async def error_context(request: web.Request) -> web.StreamResponse:
    """Why one has ended."""
    shown = _describe(_known(request))
    return web.json_response({name: shown[name] for name in ("status", "errorType", "errorMessage")})


async def logs(request: web.Request) -> web.StreamResponse:
    """What the start command has written."""
    job = next(iter(_known(request).jobs.values()), None)
    output = await job.output() if job is not None else None
    return web.json_response({"logs": output.stdout + output.stderr if output is not None else ""})


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ROUTES: Final[list[tuple[str, str, Handler]]] = [
    ("POST", _CONTROL, create),
    ("GET", _CONTROL, list_sandboxes),
    ("DELETE", _CONTROL, delete_sandboxes),
    ("POST", f"{_CONTROL}/status:batchGet", statuses),
    ("GET", f"{_CONTROL}/{{id}}", get_sandbox),
    ("DELETE", f"{_CONTROL}/{{id}}", delete_sandbox),
    ("POST", f"{_CONTROL}/{{id}}/auth", give_pass),
    ("GET", f"{_CONTROL}/{{id}}/error-context", error_context),
    ("GET", f"{_CONTROL}/{{id}}/logs", logs),
    *gateway.ROUTES,
]


def error_response(request: web.Request, error: Exception) -> web.Response | None:
    """The error as these clients read it; None on routes that are not theirs."""
    is_gateway = request.path.startswith(gateway.PREFIX)
    if not is_gateway and request.path != _CONTROL and not request.path.startswith(_CONTROL + "/"):
        return None
    body = faults.describe(error)
    if is_gateway and isinstance(error, MachineLost | faults.NoMachine):
        return web.json_response({"error": "sandbox_not_found", "detail": body["message"]}, status=502)
    is_missing = isinstance(error, FileNotFoundError | MachineLost)
    status = 404 if is_missing else faults.status_of(body)
    return web.json_response({"detail": body["message"], "error": body["type"]}, status=status)


def _known(request: web.Request) -> MachineRecord:
    return service_of(request).register.find(holder_of(request), request.match_info["id"])


async def _body(request: web.Request) -> dict[str, Any]:
    config = service_of(request).config
    return await read_json(request, config.max_json_mb, config.stall_s)


def _config(body: dict[str, Any]) -> MachineConfig:
    lifetime_s = _minutes(body, "timeout_minutes", 60)
    config = MachineConfig(
        memory_mb=min(_MOST_MEMORY_MB, int(_figure(body, "memory_gb", 1.0) * 1024)),
        disk_mb=min(_MOST_DISK_MB, int(_figure(body, "disk_size_gb", 10.0) * 1024)),
        max_processes=256,
        lifetime_s=lifetime_s,
        idle_s=_minutes(body, "idle_timeout_minutes", None),
        env={**texts(body, "environment_vars"), **texts(body, "secrets")},
        labels={str(label): "" for label in take(body, "labels", list, [])},
    )
    config.limits()
    return config


def _figure(body: dict[str, Any], name: str, default: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise UserError(f"{name} is {str(value)[:40]!r}; it must be a number above 0")
    return float(value)


def _minutes(body: dict[str, Any], name: str, default: int | None) -> float | None:
    """A negative number of minutes is no limit."""
    value = body.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value == 0:
        raise UserError(f"{name} is {str(value)[:40]!r}; it must be negative for infinite or at least 1")
    return None if value < 0 else value * 60.0


def _describe(record: MachineRecord) -> dict[str, Any]:
    config, asked = record.machine.config, record.extra
    created = _iso(record.created)
    is_running, is_over = record.ended is None, cause_of(record.why) is EndCause.LIFETIME
    status = "RUNNING" if is_running else "TIMEOUT" if is_over else "TERMINATED"
    return {
        "id": record.id,
        "name": record.name or record.id,
        "dockerImage": str(asked.get("docker_image") or "python:3.11-slim"),
        "startCommand": asked.get("start_command"),
        "cpuCores": asked.get("cpu_cores", 1.0),
        "memoryGB": config.memory_mb / 1024,
        "diskSizeGB": config.disk_mb / 1024,
        "diskMountPath": "/work",
        "gpuCount": 0,
        "gpuType": None,
        "vm": False,
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
