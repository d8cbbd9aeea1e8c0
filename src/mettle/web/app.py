"""Routes, and what stands around each of them: the door, the error as an answer, the end of a request nobody waits for.

Parts: `WebApp` (put it around a `routed` table, or around middleware of your own that is around one), `routed`;
`route_error` and `wrong_method`; `begin`, `undisturbed`, `is_gone` and `is_delivered` (for a route that writes its own
ASGI messages). Invariants: what a handler raises is one answer, or, once an answer has begun, the end of the
connection; a handler whose client has gone is cancelled, and so is one that still works when the server stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from mettle.web.doors import Access, Door
from mettle.web.problems import ErrorBody, HttpError, error_response, problem_body

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
_BEGUN: Final = "mettle.begun"
CONNECTION: Final = "mettle.connection"
"""Where the scope has the connection that a request came by, if it came by a `mettle.web.server`."""


class WebApp:
    """An ASGI application. `state` is what handlers find at `request.app.state`.

    `as_error` says what an exception of the app's own is as an answer; None leaves it to be a 500.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        door: Door,
        error_body: ErrorBody = problem_body,
        as_error: Callable[[Exception], HttpError | None] = lambda _: None,
        **state: Any,
    ) -> None:
        self.state = SimpleNamespace(**state)
        self.door, self._app = door, app
        self._error_body, self._as_error = error_body, as_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        connection = scope.get(CONNECTION)
        if connection is not None:
            connection.task = asyncio.current_task()
        try:
            refused = self.door.refusal(scope)
            if refused is not None:
                raise refused
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if is_gone(scope):
                return
            if has_begun(scope):
                raise
            await self._refuse(HttpError(503, "the server is shutting down", code="stopping"), scope, receive, send)
        except ClientDisconnect:
            return
        except Exception as error:
            if has_begun(scope):
                raise
            await self._refuse(self.error_of(error), scope, receive, send)
        finally:
            if connection is not None and connection.task is asyncio.current_task():
                connection.task = None

    def error_of(self, error: Exception) -> HttpError:
        """An exception as an answer; one that nobody knows is logged."""
        if isinstance(error, HttpError):
            return error
        if isinstance(error, HTTPException):
            return route_error(error)
        known = self._as_error(error)
        if known is not None:
            return known
        logger.error("a handler failed", exc_info=error)
        return HttpError(500, f"{type(error).__name__}: {error}", code="internal")

    def error_event(self, error: Exception) -> dict[str, Any]:
        """An exception as the body of an answer, for a stream that has begun."""
        return dict(self._error_body(self.error_of(error)))

    async def _refuse(self, error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(error, self._error_body)(scope, receive, send)


def route_error(error: HTTPException) -> HttpError:
    """What the router says of a path that nothing serves, or not by this method."""
    if error.status_code != 405:
        return HttpError(error.status_code, str(error.detail), code="no_route", headers=error.headers)
    return wrong_method(", ".join(sorted((error.headers or {}).get("Allow", "").split(", "))))


def wrong_method(allowed: str) -> HttpError:
    return HttpError(405, f"this route takes {allowed}", code="wrong_method", headers={"Allow": allowed})


class Endpoint:
    """The handlers of one path, by method, as an ASGI application. Each is behind the server's door."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.handlers: dict[str, tuple[Handler, Access]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        handler, access = self.handlers["GET" if method == "HEAD" else method]
        scope["app"].door.admit(access, scope)
        response = await handler(Request(scope, receive))
        scope[_BEGUN] = True
        await response(scope, receive, send)


Row = tuple[str, str, Handler] | tuple[str, str, Handler, Access]


def routed(table: Iterable[Row | BaseRoute]) -> Router:
    """The routes of a table of method, path and handler, and whom it is for: holders of the key, if it does not say.

    The first path that fits is taken. A path that is asked for with GET answers HEAD, too: the server leaves the body
    out.
    """
    places: list[Endpoint | BaseRoute] = []
    endpoints: dict[str, Endpoint] = {}
    for row in table:
        if isinstance(row, BaseRoute):
            places.append(row)
            continue
        method, path, handler = row[:3]
        if path not in endpoints:
            endpoints[path] = Endpoint(path)
            places.append(endpoints[path])
        endpoints[path].handlers[method] = (handler, row[3] if len(row) == 4 else "key")
    routes = [
        place if isinstance(place, BaseRoute) else Route(place.path, place, methods=[*place.handlers])
        for place in places
    ]
    return Router(routes, redirect_slashes=False)


def begin(scope: Scope) -> None:
    """Say that the first byte of an answer is about to be sent: from here on no other answer can be given."""
    scope[_BEGUN] = True


def has_begun(scope: Scope) -> bool:
    return bool(scope.get(_BEGUN))


async def is_delivered(scope: Scope) -> bool:
    """Wait until the client has taken what was sent, as far as the system tells; False when it has gone before."""
    connection = scope.get(CONNECTION)
    if connection is not None:
        await connection.drain()
    return not is_gone(scope)


@contextmanager
def undisturbed(scope: Scope) -> Iterator[None]:
    """A part of a handler that runs to its end although the client goes; ask `is_gone` afterwards."""
    connection = scope.get(CONNECTION)
    if connection is None:
        yield
        return
    task, connection.task = connection.task, None
    try:
        yield
    finally:
        connection.task = task


def is_gone(scope: Scope) -> bool:
    """True when the client has hung up."""
    connection = scope.get(CONNECTION)
    return connection is not None and connection.is_gone
