"""The Hub as an ASGI application: API, pages, static files, errors, security headers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import mettle
from mettle.errors import StorageError, UserError
from mettle.hub import api, evaluation_pages, pages
from mettle.hub.catalog import RunCatalog
from mettle.hub.security import SecurityMiddleware
from mettle.web.bodies import first_fault
from mettle.web.doors import LOOPBACK_NAMES, Door
from mettle.web.problems import HttpError, problem_body

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
MAX_BODY_BYTES = 1 << 20
"""Nothing here reads a body."""


class CachedStatic(StaticFiles):
    """Static files that a browser may keep; their addresses carry the version."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        scope: Scope = args[2] if len(args) > 2 else kwargs["scope"]
        is_versioned = b"v=" in scope.get("query_string", b"")
        response.headers["cache-control"] = "public, max-age=31536000, immutable" if is_versioned else "no-cache"
        return response


def create_app(
    runs_dir: Path, *, workspace: Path | None = None, allowed_hosts: frozenset[str] | None = LOOPBACK_NAMES
) -> FastAPI:
    """The pages over a folder of runs, or over one run, and over the evaluations under `workspace`.

    `allowed_hosts` None answers to any name.
    """
    app = FastAPI(
        title="Mettle Hub",
        version=mettle.__version__,
        description="Read-only access to runs and evaluations.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    app.state.catalog = RunCatalog(runs_dir, workspace=workspace)
    app.include_router(api.health_router)
    app.include_router(api.router)
    app.include_router(pages.router)
    app.include_router(evaluation_pages.router)
    app.mount("/static", CachedStatic(directory=STATIC), name="static")
    app.add_middleware(SecurityMiddleware, door=Door(allowed_hosts, max_body_bytes=MAX_BODY_BYTES))
    app.add_exception_handler(UserError, _not_found)
    app.add_exception_handler(StorageError, _unreadable)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(OverflowError, _too_large)
    app.add_exception_handler(Exception, _crashed)
    return app


def _answer(request: Request, status: int, title: str, detail: str) -> Response:
    if request.url.path.startswith("/api/") or request.url.path.endswith(".json"):
        return JSONResponse(problem_body(HttpError(status, detail)), status_code=status)
    return pages.error_page(request, status, title, detail)


def _not_found(request: Request, error: Exception) -> Response:
    return _answer(request, 404, "Not here", str(error))


def _unreadable(request: Request, error: Exception) -> Response:
    logger.warning("cannot read", extra={"path": request.url.path, "error": str(error)})
    return _answer(request, 503, "This cannot be read", str(error))


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
