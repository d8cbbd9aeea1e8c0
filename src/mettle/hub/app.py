"""The Hub as an ASGI application: API, pages, static files, errors, security headers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

import mettle
from mettle.errors import StorageError, UserError
from mettle.hub import api, comparison_pages, evaluation_pages, pages
from mettle.hub.catalog import RunCatalog
from mettle.hub.security import SecurityMiddleware
from mettle.web.bodies import first_fault
from mettle.web.doors import LOOPBACK_NAMES, Door
from mettle.web.problems import HttpError, openai_body, problem_body

if TYPE_CHECKING:
    from mettle.hub.lab import Lab
    from mettle.hub.sandboxes import HubSandboxes
    from mettle.hub.serving.engines import ModelEngines

logger = logging.getLogger(__name__)

SANDBOX_PATHS = (
    "/api/v1/sandbox", "/api/v1/machines", "/api/v1/judge", "/api/v1/languages", "/api/v1/lease", "/api/v1/status",
    "/api/v1/isolation", "/gw",
)  # fmt: skip
"""What the Hub's sandboxes answer."""

STATIC = Path(__file__).parent / "static"
MAX_BODY_BYTES = 1 << 20
"""Nothing of the read-only pages reads a body."""
MAX_UPLOAD_BYTES = 512 << 20
"""The most that any route of a Hub with accounts takes; nearly all take far less."""


_OPENAI = "/v1/"
_PROGRAMS = (_OPENAI, "/train/", "/api/", "/simple/", "/owners/", "/packages/")


class CachedStatic(StaticFiles):
    """Static files that a browser may keep; their addresses carry the version."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        scope: Scope = args[2] if len(args) > 2 else kwargs["scope"]
        is_versioned = b"v=" in scope.get("query_string", b"")
        response.headers["cache-control"] = "public, max-age=31536000, immutable" if is_versioned else "no-cache"
        return response


def create_app(
    runs_dir: Path,
    *,
    workspace: Path | None = None,
    allowed_hosts: frozenset[str] | None = LOOPBACK_NAMES,
    lab: Lab | None = None,
    sandboxes: HubSandboxes | None = None,
    engines: ModelEngines | None = None,
) -> FastAPI:
    """The pages over a folder of runs, or over one run, and over the evaluations under `workspace`.

    `allowed_hosts` None answers to any name. With a `lab` it is a Hub with accounts; without one, read-only.
    """
    app = FastAPI(
        title="Mettle Hub",
        version=mettle.__version__,
        description="Runs and evaluations, people and teams, environments.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    app.state.catalog = RunCatalog(runs_dir, workspace=workspace)
    app.include_router(api.health_router)
    app.state.lab, app.state.open_pushed, app.state.open_hosted = lab, None, None
    app.state.sandboxes, app.state.engines = sandboxes, engines
    shown: list[Any] = []
    if lab is not None:
        # The page of one run is quick to start, and needs nothing of this.
        from sqlalchemy.exc import DataError, IntegrityError

        from mettle.hub.routes import include_routes, looking

        shown = [Depends(looking.looking_at_runs)]
        app.state.training_proxy = None  # made by the first request for it
        include_routes(app)
        app.add_exception_handler(IntegrityError, _conflict)
        app.add_exception_handler(DataError, _not_kept)
    for router in (api.router, pages.router, comparison_pages.router, evaluation_pages.router):
        app.include_router(router, dependencies=shown)
    if sandboxes is not None:
        app.add_middleware(SandboxMiddleware, sandboxes=sandboxes)
    app.mount("/static", CachedStatic(directory=STATIC), name="static")
    app.add_middleware(
        SecurityMiddleware, door=Door(allowed_hosts, max_body_bytes=MAX_UPLOAD_BYTES if lab else MAX_BODY_BYTES)
    )
    app.add_exception_handler(UserError, _mistaken)
    app.add_exception_handler(HttpError, _answered)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(StorageError, _unreadable)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(OverflowError, _too_large)
    app.add_exception_handler(UnicodeEncodeError, _not_kept)
    app.add_exception_handler(Exception, _crashed)
    return app


class SandboxMiddleware:
    """Hands requests for sandboxes, websockets among them, to the service that is part of the Hub."""

    def __init__(self, app: ASGIApp, sandboxes: HubSandboxes) -> None:
        self._app, self._sandboxes = app, sandboxes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_theirs = any(path == each or path.startswith(each + "/") for each in SANDBOX_PATHS)
        await (self._sandboxes if is_theirs else self._app)(scope, receive, send)


def _is_for_programs(request: Request) -> bool:
    return request.url.path.startswith(_PROGRAMS) or request.url.path.endswith(".json")


def _body_of(request: Request, error: HttpError) -> dict[str, Any]:
    """Under `/v1` as the OpenAI clients read it."""
    return dict(openai_body(error) if request.url.path.startswith(_OPENAI) else problem_body(error))


def _answer(request: Request, status: int, title: str, detail: str) -> Response:
    if _is_for_programs(request):
        return JSONResponse(_body_of(request, HttpError(status, detail)), status_code=status)
    return pages.error_page(request, status, title, detail)


def _mistaken(request: Request, error: Exception) -> Response:
    """What is asked for is not there; what is sent is wrong."""
    is_read = request.method in ("GET", "HEAD")
    return _answer(request, 404 if is_read else 400, "Not here" if is_read else "Not possible", str(error))


def _answered(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError), "registered for HttpError"
    if _is_for_programs(request):
        return JSONResponse(_body_of(request, error), status_code=error.status, headers=error.headers)
    if error.status == 401 and request.method in ("GET", "HEAD"):
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/signin?next={quote(path, safe='')}", status_code=303)
    answer = pages.error_page(request, error.status, "Not here" if error.status == 404 else "Not possible", str(error))
    answer.headers.update(error.headers)
    return answer


def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this answer."""
    return Response(status_code=499)


def _unreadable(request: Request, error: Exception) -> Response:
    logger.warning("storage refused", extra={"path": request.url.path, "error": str(error)})
    return _answer(
        request, 503, "This cannot be read" if request.method in ("GET", "HEAD") else "Nothing was kept", str(error)
    )


def _conflict(request: Request, error: Exception) -> Response:
    """Two wrote the same name at once, which only a database with several writers lets come so far."""
    logger.info("a conflict", extra={"path": request.url.path, "error": str(getattr(error, "orig", error))})
    return _answer(request, 409, "Not possible", "Somebody else wrote the same thing at this moment; try again.")


def _not_kept(request: Request, error: Exception) -> Response:
    """A zero byte for PostgreSQL, half of a character pair, a text that is longer than its column."""
    logger.info("not kept", extra={"path": request.url.path, "error": str(getattr(error, "orig", error))})
    return _answer(request, 422, "Not possible", "The database keeps no such text or number; change what is sent.")


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTPException"
    detail = "There is no such page." if error.detail == "Not Found" else str(error.detail)
    answer = _answer(request, error.status_code, "Not here" if error.status_code == 404 else "Not possible", detail)
    answer.headers.update(error.headers or {})
    return answer


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for RequestValidationError"
    place, message = first_fault(error.errors())
    return _answer(request, 422, "Not possible", f"{place.partition('.')[2]}: {message}")


def _too_large(request: Request, error: Exception) -> Response:
    """SQLite holds 64 bits, and an address may hold any number."""
    return _answer(request, 422, "Not possible", "A number in the address is larger than any that is kept.")


def _crashed(request: Request, error: Exception) -> Response:
    logger.error("unexpected error", exc_info=error, extra={"path": request.url.path})
    return _answer(request, 500, "Something broke", f"{type(error).__name__}; the Hub's log has the details.")
