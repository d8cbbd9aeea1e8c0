"""An error as an answer: a status, a line for a person, and words that a program can tell apart.

Parts: `HttpError`; the two bodies that an app may choose, `openai_body` (`{"error": {"message", "type", "param",
"code"}}`, by which the OpenAI clients pick their exceptions) and `problem_body` (RFC 9457, for our own APIs);
`json_response`. Invariant: a program never has to read the line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from pydantic_core import to_json
from starlette.responses import Response

_OPENAI_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class HttpError(Exception):
    """An answer other than 200. `code` is for programs, `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})
        if status in (429, 503):  # where it makes sense to come back, the answer says when
            self.headers.setdefault("Retry-After", "1")


ErrorBody = Callable[[HttpError], Mapping[str, Any]]


def openai_body(error: HttpError) -> dict[str, Any]:
    """The error as the OpenAI API words it."""
    kind = _OPENAI_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def problem_body(error: HttpError) -> dict[str, Any]:
    """The error as RFC 9457 words it."""
    body = {"title": HTTPStatus(error.status).phrase, "status": error.status, "detail": str(error)}
    extra = {"code": error.code, "param": error.param}
    return body | {name: value for name, value in extra.items() if value is not None}


def error_response(error: HttpError, body: ErrorBody) -> Response:
    """The response of an error."""
    return json_response(body(error), status=error.status, headers=error.headers)


def json_response(body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A compact JSON answer."""
    try:
        data = to_json(body, inf_nan_mode="constants")
    except ValueError:  # half of a character, which only an escape can carry
        data = json.dumps(body, separators=(",", ":")).encode()
    return Response(data, status, headers, "application/json")
