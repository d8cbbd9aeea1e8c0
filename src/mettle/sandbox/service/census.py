"""What there is: machines made, listed and ended; clients heard of; the service itself, also for Prometheus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from mettle.errors import UserError
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.endings import EndCause, EndReason
from mettle.sandbox.service.bodies import read_json, seconds, take, texts
from mettle.sandbox.service.faults import NoMachine
from mettle.sandbox.service.machines import MachineRecord
from mettle.sandbox.service.metrics import CONTENT_TYPE, Sample
from mettle.sandbox.service.state import KEY_HEADER, SandboxService, client_of, holder_of, service_of
from mettle.sandbox.service.tokens import GIVEN, LOCAL
from mettle.sandbox.service.wire import pack

_CONFIG_FIELDS = {
    *("memory_mb", "disk_mb", "max_processes", "cpus", "lifetime_s", "idle_s", "env", "labels", "name", "files"),
}


async def create(request: web.Request) -> web.StreamResponse:
    """Make a machine. With an idempotency key, the same request gives the same machine."""
    service, holder, client = service_of(request), holder_of(request), client_of(request)
    body = await read_json(request, service.config.max_json_mb, service.config.stall_s)
    config, name = machine_config(body), take(body, "name", str, "")[:100]

    async def make() -> MachineRecord:
        return await service.register.create(holder, client, config, name=name)

    key = request.headers.get(KEY_HEADER)
    scoped = f"{holder.name}/create/{key}" if key else None
    record = await service.idempotent.run(scoped, json.dumps(body, sort_keys=True), make)
    report = service.seen(record.machine.isolation)
    return web.json_response({**record.as_dict(), "isolation": report}, status=201)


def machine_config(body: dict[str, Any]) -> MachineConfig:
    """The machine that a body asks for. Raises: UserError."""
    unknown = set(body) - _CONFIG_FIELDS
    if unknown:
        raise UserError(f"a machine has no {sorted(unknown)}; it has {', '.join(sorted(_CONFIG_FIELDS))}")
    default = MachineConfig()
    config = MachineConfig(
        memory_mb=take(body, "memory_mb", int, default.memory_mb),
        disk_mb=take(body, "disk_mb", int, default.disk_mb),
        max_processes=take(body, "max_processes", int, default.max_processes),
        cpus=seconds(body, "cpus", default.cpus),
        lifetime_s=seconds(body, "lifetime_s", default.lifetime_s),
        idle_s=seconds(body, "idle_s", default.idle_s),
        env=texts(body, "env"),
        labels=texts(body, "labels"),
        files=texts(body, "files"),
    )
    config.limits()  # says what is wrong with the environment
    return config


async def list_machines(request: web.Request) -> web.StreamResponse:
    """A page of the token's machines, oldest first: `label=name=value` (several: all of them), `status`, `limit`."""
    register = service_of(request).register
    query = request.query
    try:
        limit = int(query.get("limit", 100))
    except ValueError:
        raise UserError(f"limit is {query['limit']!r}; it must be a whole number") from None
    labels = dict(text.partition("=")[::2] for text in query.getall("label", []))
    register.sweep()
    found, cursor = register.page(holder_of(request), labels, query.get("status"), limit, query.get("cursor"))
    return web.json_response({"machines": [record.as_dict() for record in found], "next_cursor": cursor})


async def show(request: web.Request) -> web.StreamResponse:
    """One machine, also for a while after it has ended."""
    service = service_of(request)
    record = service.register.find(holder_of(request), request.match_info["id"])
    return web.json_response({**record.as_dict(), "isolation": service.seen(record.machine.isolation)})


async def delete(request: web.Request) -> web.StreamResponse:
    """End a machine. One that has ended already is no mistake."""
    service = service_of(request)
    record = service.register.find(holder_of(request), request.match_info["id"])
    await service.register.delete(record)
    return web.json_response(record.as_dict())


async def delete_many(request: web.Request) -> web.StreamResponse:
    """End machines by `ids`, or by `labels`, or all with `all`."""
    service, holder = service_of(request), holder_of(request)
    body = await read_json(request, service.config.max_json_mb, service.config.stall_s)
    ids, labels = take(body, "ids", list, []), texts(body, "labels")
    if not ids and not labels and not take(body, "all", bool, False):
        raise UserError('nothing was chosen: give "ids", "labels", or "all": true')
    chosen = service.register.select(holder, labels, "running")
    if ids:
        chosen = [record for record in chosen if record.id in set(map(str, ids))]
    await service.register.delete_all(chosen)
    return web.json_response({"deleted": [record.id for record in chosen]})


async def keep_alive(request: web.Request) -> web.StreamResponse:
    """Say that the client is still there; hear which of its machines are not.

    `abandoned` are the keys of creations whose answer the client never got: their machines end.
    """
    service, holder, client = service_of(request), holder_of(request), client_of(request)
    if not client:
        raise UserError("a lease needs the header Mettle-Client")
    body = await read_json(request, service.config.max_json_mb, service.config.stall_s)
    for key in take(body, "abandoned", list, []):
        task = service.idempotent.forget(f"{holder.name}/create/{key}")
        if task is not None:
            task.add_done_callback(lambda done: _end_abandoned(service, done))
    service.register.sweep()
    return web.json_response(
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
    ending = asyncio.create_task(
        service.register.delete(task.result(), EndReason("its client never learned of it", EndCause.LEFT))
    )
    service.endings.add(ending)
    ending.add_done_callback(service.endings.discard)


async def leave(request: web.Request) -> web.StreamResponse:
    """Say that the client is going: its machines end."""
    service, holder, client = service_of(request), holder_of(request), client_of(request)
    chosen = service.register.of_client(holder.name, client) if client else []
    await service.register.delete_all(chosen, EndReason("its client left", EndCause.LEFT))
    return web.json_response({"deleted": [record.id for record in chosen]})


async def health(request: web.Request) -> web.StreamResponse:
    """Whether it takes requests; the one route that needs no token."""
    is_closing = service_of(request).is_closing
    return web.json_response({"status": "closing" if is_closing else "ok"}, status=503 if is_closing else 200)


async def status(request: web.Request) -> web.StreamResponse:
    """How busy it is, what isolation it gives, and what the token has and may have."""
    service, holder = service_of(request), holder_of(request)
    judge = service.judge
    body = {
        "backend": service.config.sandbox.backend,
        "python_packages": list(service.config.sandbox.python_packages),
        "judge": judge and {"isolation": service.seen(judge.isolation), "grade": judge.isolation.grade},
        "machines": {
            "isolation": service.seen(service.register.pool.isolation),
            "grade": service.register.pool.isolation.grade,
        },
        "reports": {name: pack(report) for name, report in service.reports.items()},
        "load": load(service),
        "lease_s": service.config.lease_s,
        "token": {
            "name": holder.name,
            "quota": holder.quota.model_dump(),
            "num_machines": service.quotas.of(holder).num_machines,
        },
    }
    return web.json_response(body)


def load(service: SandboxService) -> dict[str, int]:
    """The figures that a client spreads its work by."""
    return {
        "num_judging": service.num_judging,
        "max_running": service.config.sandbox.max_running,
        "num_machines": service.register.num_running + service.register.num_making,
        "max_machines": service.config.quota.max_machines,
    }


async def report(request: web.Request) -> web.StreamResponse:
    """An isolation report by the name that a result has."""
    name = request.match_info["name"]
    found = service_of(request).reports.get(name)
    if found is None:
        raise NoMachine(f"there is no isolation report {name!r}")
    return web.json_response({"report": pack(found)})


async def metrics(request: web.Request) -> web.StreamResponse:
    """The page for Prometheus. The figures of other tokens are shown to the service's own token (or socket) alone."""
    service, holder = service_of(request), holder_of(request)
    service.register.sweep()

    def is_shown(token: str) -> bool:
        return not token or token == holder.name or holder.name in (GIVEN, LOCAL)

    pool = getattr(service.judge, "stats", None)
    for name in ("cells", "cells_lost", "remembered"):
        service.metrics.counts[f"judge_{name}_total"][()] = int(getattr(pool, f"num_{name}", 0))
    gauges = {**_of_the_service(service, pool), **_of_tokens(service, is_shown)}
    return web.Response(text=service.metrics.page(gauges, is_shown), headers={"Content-Type": CONTENT_TYPE})


def _of_the_service(service: SandboxService, pool: Any) -> dict[str, list[Sample]]:
    running = int(getattr(pool, "num_running", service.num_judging))
    figures = {
        "judge_queue": max(0, service.num_judging - running),
        "judge_running": running,
        "judge_slots": service.config.sandbox.max_running,
        "judge_warm": int(getattr(pool, "num_warm", 0)),
        "machines": service.register.num_running,
        "machines_making": service.register.num_making,
        "requests_open": service.num_open,
    }
    return {name: [((), value)] for name, value in figures.items()}


def _of_tokens(service: SandboxService, is_shown: Callable[[str], bool]) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}
    for name, account in sorted(service.quotas.accounts.items()):
        if not is_shown(name):
            continue
        quota = account.quota
        for what, value in (
            ("machines", account.num_machines),
            ("max_machines", quota.max_machines),
            ("memory_bytes", account.memory_mb << 20),
            ("max_memory_bytes", quota.max_memory_mb << 20),
            ("disk_bytes", account.disk_mb << 20),
            ("max_disk_bytes", quota.max_disk_mb << 20),
            ("judging", account.num_judging),
            ("max_judging", quota.max_judging),
            ("requests_open", account.num_requests),
        ):
            samples.setdefault(f"token_{what}", []).append(((("token", name),), value))
    return samples
