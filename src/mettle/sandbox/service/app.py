"""The service's routes, and what stands around each of them: token, quota, lease, figures, errors.

Invariant: whatever a handler raises becomes one typed line (`answers.py`); a request that ends early, because its
client has gone, cancels its handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Router, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send

from mettle.sandbox.machines.endings import EndCause, EndReason
from mettle.sandbox.service import faults
from mettle.sandbox.service.answers import ServiceProblem, body_of, problem_of
from mettle.sandbox.service.messages import PREFIX
from mettle.sandbox.service.routes import (
    commands,
    files,
    judge,
    leases,
    machines,
    ports,
    prime,
    prime_gateway,
    status,
)
from mettle.sandbox.service.state import SandboxService, client_of
from mettle.sandbox.service.tokens import LOCAL, Holder
from mettle.web.app import Endpoint, Row, WebApp, route_error, routed
from mettle.web.doors import Door, allowed_hosts
from mettle.web.problems import HttpError

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
OPEN: Final = ("/health",)
_SWEEP_S: Final = 0.5
_GONE: Final = 499
"""Stands in the figures for a client that has gone."""
_ON_THE_SOCKET: Final = "sandbox"
"""What clients call a service on a Unix socket."""

ROUTES: Final[list[Row]] = [
    ("GET", "/health", status.health),
    ("GET", "/metrics", status.metrics),
    ("GET", f"{PREFIX}/status", status.status),
    ("GET", f"{PREFIX}/isolation/{{name}}", status.report),
    ("POST", f"{PREFIX}/judge", judge.judge),
    ("GET", f"{PREFIX}/languages", judge.languages),
    ("POST", f"{PREFIX}/lease", leases.keep_alive),
    ("DELETE", f"{PREFIX}/lease", leases.leave),
    ("POST", f"{PREFIX}/machines", machines.create),
    ("GET", f"{PREFIX}/machines", machines.list_machines),
    ("DELETE", f"{PREFIX}/machines", machines.delete_many),
    ("GET", f"{PREFIX}/machines/{{id}}", machines.show),
    ("DELETE", f"{PREFIX}/machines/{{id}}", machines.delete),
    ("POST", f"{PREFIX}/machines/{{id}}/exec", commands.execute),
    ("POST", f"{PREFIX}/machines/{{id}}/jobs", commands.start_job),
    ("GET", f"{PREFIX}/machines/{{id}}/jobs", commands.list_jobs),
    ("GET", f"{PREFIX}/machines/{{id}}/jobs/{{job}}", commands.show_job),
    ("DELETE", f"{PREFIX}/machines/{{id}}/jobs/{{job}}", commands.kill_job),
    ("PUT", f"{PREFIX}/machines/{{id}}/files", files.put_file),
    ("POST", f"{PREFIX}/machines/{{id}}/files", files.put_files),
    ("GET", f"{PREFIX}/machines/{{id}}/files", files.get_file),
    ("GET", f"{PREFIX}/machines/{{id}}/entries", files.list_entries),
    ("GET", f"{PREFIX}/machines/{{id}}/snapshot", files.get_snapshot),
    ("PUT", f"{PREFIX}/machines/{{id}}/snapshot", files.put_snapshot),
    *prime.ROUTES,
]
WEBSOCKETS: Final[list[tuple[str, ports.Handler]]] = [
    (f"{PREFIX}/machines/{{id}}/connect/{{port}}", ports.connect),
    (f"{PREFIX}/machines/{{id}}/listen", ports.listen),
    (f"{PREFIX}/machines/{{id}}/listen/{{port}}/{{connection}}", ports.fetch),
]


Identify = Callable[[SandboxService, HTTPConnection], Awaitable[Holder]]


def make_app(service: SandboxService, identify: Identify | None = None) -> WebApp:
    """The application of a service whose pools have been started. `identify` says whose a request is."""
    config = service.config
    allowed = None if config.unix is not None else allowed_hosts(config.host, [_ON_THE_SOCKET])
    websockets = [WebSocketRoute(path, ports.PortSocket(handler)) for path, handler in WEBSOCKETS]
    around = Around(service, routed([*ROUTES, *websockets]), identify or _identify)
    door = Door(allowed, max_body_bytes=max(config.max_body_mb, config.max_json_mb) << 20)
    return WebApp(around, door=door, error_body=body_of, service=service)


class Around:
    """Middleware: who asks, whether they may, and what became of it."""

    def __init__(self, service: SandboxService, router: Router, identify: Identify) -> None:
        self._service, self._router, self._identify = service, router, identify

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, started = self._service, time.monotonic()
        service.num_open += 1
        found, headers = _GONE, Headers(scope=scope)
        is_read = "content-length" not in headers and "transfer-encoding" not in headers

        async def receive_and_note() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def send_and_note(message: Message) -> None:
            nonlocal found
            if message["type"] == "http.response.start":
                found = message["status"]
            elif message["type"] == "websocket.accept":
                found = 101
            await send(message)

        try:
            await self._serve(scope, receive_and_note, send_and_note)
        except HttpError as error:
            found = error.status
            if not is_read:
                error.headers["Connection"] = "close"  # what is left of the body is not worth reading
            raise
        finally:
            service.num_open -= 1
            service.last_used = time.monotonic()
            service.metrics.add_time("request_seconds", service.last_used - started)
            service.metrics.count("requests_total", route=_route(scope), status=str(found))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, holder = HTTPConnection(scope), None
        try:
            with contextlib.ExitStack() as stack:
                if scope["path"] not in OPEN:
                    holder = scope.setdefault("state", {})["holder"] = await self._identify(self._service, request)
                    if self._service.is_closing:
                        raise faults.ServiceBusy("this sandbox service is shutting down")
                    stack.enter_context(self._service.quotas.request(holder))
                    if client := client_of(request):
                        stack.enter_context(self._service.leases.during_request((holder.name, client)))
                await self._router(scope, receive, send)
        except ClientDisconnect:
            raise
        except Exception as error:
            raise self._problem(error, request, holder) from error

    def _problem(self, error: Exception, request: HTTPConnection, holder: Holder | None) -> ServiceProblem:
        if isinstance(error, HTTPException):
            error = route_error(error)
        problem = prime.problem_of(error, request) or problem_of(error, request)
        metrics = self._service.metrics
        metrics.count("errors_total", cause=problem.kind)
        if problem.kind in ("quota", "busy") and holder is not None:
            metrics.count("refusals_total", token=holder.name, cause=problem.kind)
        if problem.kind == "token":
            remote = request.client.host if request.client else "a Unix socket"
            logger.warning("a token was refused: %s from %s", error, remote, extra={"path": request.scope["path"]})
        return problem


async def _identify(service: SandboxService, request: HTTPConnection) -> Holder:
    """Whose request it is; on a socket that only its own user can open, everybody's is that user's."""
    given = request.headers.get("Authorization")
    if service.config.unix is not None and given is None:
        return Holder(LOCAL, service.config.quota)
    return prime_gateway.gateway_holder(service, request) or service.tokens.holder(given)


@contextlib.asynccontextmanager
async def sweeping(service: SandboxService) -> AsyncIterator[None]:
    """See to machines that have ended, and to those of clients that have gone."""

    async def sweep() -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            service.register.sweep()
            await service.exposures.sweep()
            for owner, client in service.leases.take_expired():
                chosen = service.register.of_client(owner, client)
                if chosen:
                    logger.warning("a client has gone", extra={"client": client, "num_machines": len(chosen)})
                why = f"its client has not been heard of for {service.config.lease_s:g} s"
                await service.register.delete_all(chosen, EndReason(why, EndCause.LEASE))

    task = asyncio.create_task(sweep(), name="sandbox service sweep")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _route(scope: Scope) -> str:
    """What the figures call the route of a request."""
    found = scope.get("endpoint")
    if isinstance(found, Endpoint):
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        return f"{method} {found.path}" if method in found.handlers else "unknown"
    return _WEBSOCKETS.get(getattr(found, "handler", None), "unknown")


_WEBSOCKETS: Final[dict[object, str]] = {handler: f"GET {path}" for path, handler in WEBSOCKETS}
