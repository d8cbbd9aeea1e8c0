"""The service's routes, and what stands around each of them: token, quota, lease, figures, errors.

Invariant: whatever a handler raises becomes one typed line (`faults.py`); a request that ends early, because its client
has gone, cancels its handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from aiohttp import web

from mettle.sandbox.machines.endings import EndCause, EndReason
from mettle.sandbox.service import census, commands, faults, gateway, judging, ports, prime, transfers
from mettle.sandbox.service.state import HOLDER, SERVICE, SandboxService, client_of, service_of
from mettle.sandbox.service.tokens import LOCAL, Holder

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PREFIX: Final = "/api/v1"
OPEN: Final = ("/health",)
_SWEEP_S: Final = 0.5
_GONE: Final = 499
"""Stands in the figures for a client that has gone."""

ROUTES: Final[list[tuple[str, str, Handler]]] = [
    ("GET", "/health", census.health),
    ("GET", "/metrics", census.metrics),
    ("GET", f"{PREFIX}/status", census.status),
    ("GET", f"{PREFIX}/isolation/{{name}}", census.report),
    ("POST", f"{PREFIX}/judge", judging.judge),
    ("GET", f"{PREFIX}/languages", judging.languages),
    ("POST", f"{PREFIX}/lease", census.keep_alive),
    ("DELETE", f"{PREFIX}/lease", census.leave),
    ("POST", f"{PREFIX}/machines", census.create),
    ("GET", f"{PREFIX}/machines", census.list_machines),
    ("DELETE", f"{PREFIX}/machines", census.delete_many),
    ("GET", f"{PREFIX}/machines/{{id}}", census.show),
    ("DELETE", f"{PREFIX}/machines/{{id}}", census.delete),
    ("POST", f"{PREFIX}/machines/{{id}}/exec", commands.execute),
    ("POST", f"{PREFIX}/machines/{{id}}/jobs", commands.start_job),
    ("GET", f"{PREFIX}/machines/{{id}}/jobs", commands.list_jobs),
    ("GET", f"{PREFIX}/machines/{{id}}/jobs/{{job}}", commands.show_job),
    ("DELETE", f"{PREFIX}/machines/{{id}}/jobs/{{job}}", commands.kill_job),
    ("PUT", f"{PREFIX}/machines/{{id}}/files", transfers.put_file),
    ("POST", f"{PREFIX}/machines/{{id}}/files", transfers.put_files),
    ("GET", f"{PREFIX}/machines/{{id}}/files", transfers.get_file),
    ("GET", f"{PREFIX}/machines/{{id}}/entries", transfers.list_entries),
    ("GET", f"{PREFIX}/machines/{{id}}/snapshot", transfers.get_snapshot),
    ("PUT", f"{PREFIX}/machines/{{id}}/snapshot", transfers.put_snapshot),
    ("GET", f"{PREFIX}/machines/{{id}}/connect/{{port}}", ports.connect),
    ("GET", f"{PREFIX}/machines/{{id}}/listen", ports.listen),
    ("GET", f"{PREFIX}/machines/{{id}}/listen/{{port}}/{{connection}}", ports.fetch),
    *prime.ROUTES,
]


def make_app(service: SandboxService) -> web.Application:
    """The application of a service whose pools have been started."""
    app = web.Application(middlewares=[_around], client_max_size=service.config.max_json_mb << 20)
    app[SERVICE] = service
    app[ports.LISTENERS] = {}
    for method, path, handler in ROUTES:
        app.router.add_route(method, path, handler)
    app.cleanup_ctx.append(_sweeping)
    return app


@web.middleware
async def _around(request: web.Request, handler: Handler) -> web.StreamResponse:
    service, started = service_of(request), time.monotonic()
    service.num_open += 1
    status = _GONE
    try:
        with service.idle_connections.serving(request.protocol):
            response = await _answer(service, request, handler)
        status = response.status
        return response
    finally:
        service.num_open -= 1
        service.last_used = time.monotonic()
        service.metrics.times["request_seconds"].add(service.last_used - started)
        service.metrics.count("requests_total", route=_route(request), status=str(status))


async def _answer(service: SandboxService, request: web.Request, handler: Handler) -> web.StreamResponse:
    holder: Holder | None = None
    try:
        with contextlib.ExitStack() as stack:
            if request.path not in OPEN:
                holder = _identify(service, request)
                HOLDER.set(holder)
                if service.is_closing:
                    raise faults.ServiceBusy("this sandbox service is shutting down")
                stack.enter_context(service.quotas.request(holder))
                if client := client_of(request):
                    stack.enter_context(service.leases.during_request((holder.name, client)))
            return await handler(request)
    except asyncio.CancelledError:
        raise
    except ConnectionResetError:  # nobody is there to be answered
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=_GONE)
    except Exception as error:
        cause = faults.describe(error)["type"]
        service.metrics.count("errors_total", cause=cause)
        if cause in ("quota", "busy") and holder is not None:
            service.metrics.count("refusals_total", token=holder.name, cause=cause)
        if cause == "token":
            logger.warning("a token was refused: %s from %s", error, request.remote, extra={"path": request.path})
        response = prime.error_response(request, error) or faults.response(
            error, is_websocket="Upgrade" in request.headers
        )
        if not request.content.at_eof():
            response.force_close()  # what is left of the body is not worth reading
        return response


def _identify(service: SandboxService, request: web.Request) -> Holder:
    """Whose request it is; on a socket that only its own user can open, everybody's is that user's."""
    if service.config.unix is not None and "Authorization" not in request.headers:
        return Holder(LOCAL, service.config.quota)
    given = request.headers.get("Authorization")
    return gateway.gateway_holder(request) or service.tokens.holder(given)


async def _sweeping(app: web.Application) -> AsyncIterator[None]:
    """See to machines that have ended, and to those of clients that have gone."""
    service = app[SERVICE]

    async def sweep() -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            service.register.sweep()
            service.idle_connections.sweep()
            for owner, client in service.leases.take_expired():
                chosen = service.register.of_client(owner, client)
                if chosen:
                    logger.warning("a client has gone", extra={"client": client, "num_machines": len(chosen)})
                why = f"its client has not been heard of for {service.config.lease_s:g} s"
                await service.register.delete_all(chosen, EndReason(why, EndCause.LEASE))

    task = asyncio.create_task(sweep(), name="sandbox service sweep")
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return f"{request.method} {resource.canonical}" if resource is not None else "unknown"
