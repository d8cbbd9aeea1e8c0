"""Errors as the OpenAI API words them: `{"error": {"message", "type", "param", "code"}}` with a status that fits.

A client library picks its exception by the status; a person reads the message; `param` names the field at fault.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from mettle.errors import MettleError, UserError
from mettle.inference.engine.protocol import EngineBusy, EngineStopped, RequestRefused

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400: the request can never work as it is."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """The answer to an error that a handler raised."""
    match error:
        case ApiError():
            return error
        case RequestRefused():
            return bad_request(str(error), error.parameter, error.code)
        case EngineBusy():
            return ApiError(429, str(error), code="queue_full")
        case EngineStopped():
            return ApiError(503, str(error), code="stopping")
        case UserError():
            return bad_request(str(error))
        case MettleError():
            return ApiError(500, str(error), code="engine_failed")
        case web.HTTPException():
            return ApiError(error.status, f"{error.reason}: see /v1/models, /v1/chat/completions, /v1/generate")
    logger.error("a handler failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal")


def error_body(error: ApiError) -> dict[str, object]:
    """The JSON of an error."""
    kind = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error"}.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> web.Response:
    """The response of an error; where it makes sense to come back, it says when."""
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return json_response(error_body(error), status=error.status, headers=headers)


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A compact JSON answer."""
    return web.Response(
        body=json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(),
        status=status,
        headers=headers,
        content_type="application/json",
    )


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into an answer. A redirect is not an error."""
    try:
        return await handler(request)
    except web.HTTPRedirection:
        raise
    except Exception as error:
        return error_response(as_api_error(error))
