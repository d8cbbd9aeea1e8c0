"""Answers of the service: JSON, lines as they come, bytes of machines, and errors.

Invariant: whatever a handler raises is one typed line (`faults.py`); a client that takes nothing is hung up on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mettle.sandbox.service import faults
from mettle.sandbox.service.messages import ERROR_HEADER, HEARTBEAT_S
from mettle.web.app import CONNECTION
from mettle.web.problems import HttpError
from mettle.web.streams import JSON_LINES, StreamedAnswer

_PIECE_BYTES: Final = 1 << 20
# What the doors and readers of `mettle.web` say, in the words of this service.
_TYPES: Final = {
    **{
        "no_route": "no_route",
        "wrong_method": "wrong_method",
        "too_large": "too_large",
        "stalled": "stalled",
        "stopping": "closing",
    },
    **{"scope_missing": "refused", "csrf": "refused", "not_offered": "closing"},
    **{"host_refused": "refused", "origin_refused": "refused", "internal": "internal"},
}


def json_answer(body: Mapping[str, Any], status: int = 200) -> Response:
    """In ASCII, so that names of files that are no text arrive as they are."""
    return Response(json.dumps(body, separators=(",", ":")).encode(), status, media_type="application/json")


class TimedAnswer(StreamedAnswer):
    """Pieces for a client that takes each within `stall_s`; `on_end` is called however it ends."""

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        stall_s: float,
        media_type: str = JSON_LINES,
        *,
        headers: Mapping[str, str] | None = None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(pieces, media_type, headers={"cache-control": "no-store", **(headers or {})})
        self._stall_s, self._on_end = stall_s, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._stall_s):
                    await send(message)
            except TimeoutError:
                if (connection := scope.get(CONNECTION)) is not None:
                    connection.transport.abort()
                raise ClientDisconnect from None

        try:
            await super().__call__(scope, receive, send_in_time)
        finally:
            self._on_end()


def bytes_answer(data: bytes, stall_s: float, on_end: Callable[[], object]) -> Response:
    """Bytes of a machine's."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(data), _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES]

    headers = {"content-length": str(len(data))}
    return TimedAnswer(pieces(), stall_s, "application/octet-stream", headers=headers, on_end=on_end)


def lines_answer(
    lines: AsyncGenerator[Mapping[str, Any], None], stall_s: float, on_end: Callable[[], object]
) -> Response:
    """One JSON object a line, and an empty one when nothing has come for a while."""
    return TimedAnswer(_with_signs_of_life(lines), stall_s, on_end=on_end)


async def _with_signs_of_life(lines: AsyncGenerator[Mapping[str, Any], None]) -> AsyncGenerator[bytes, None]:
    coming: asyncio.Future[Mapping[str, Any]] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(lines))
            await asyncio.wait({coming}, timeout=HEARTBEAT_S)
            if not coming.done():
                yield b"{}\n"
                continue
            try:
                line = coming.result()
            except StopAsyncIteration:
                return
            except Exception as error:
                line = {"error": faults.describe(error)}
            coming = None
            yield json.dumps(line, separators=(",", ":")).encode() + b"\n"
    finally:
        if coming is not None and not coming.done():
            coming.cancel()
            await asyncio.wait({coming})
        await lines.aclose()


class ServiceProblem(HttpError):
    """An error as the service answers it; `body` is the whole answer, `kind` one of `faults.KINDS`."""

    def __init__(self, status: int, kind: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        super().__init__(status, kind, headers=headers)
        self.kind, self.body = kind, body


def problem_of(error: Exception, request: HTTPConnection) -> ServiceProblem:
    """An exception as an answer."""
    described = described_error(error)
    status, headers = faults.status_of(described), headers_of(error)
    if request.scope["type"] == "websocket":
        headers[ERROR_HEADER] = json.dumps({"error": described})
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return ServiceProblem(status, described["type"], {"error": described}, headers)


def headers_of(error: Exception) -> dict[str, str]:
    """What an error of `mettle.web` says in its answer's head."""
    return dict(error.headers) if isinstance(error, HttpError) else {}


def described_error(error: Exception) -> dict[str, Any]:
    """The error as data, whether it is the service's own or one of `mettle.web`."""
    if isinstance(error, HttpError):
        kind = _TYPES.get(error.code or "", "user")
        hint = ": see docs/reference/sandbox-api.md" if kind == "no_route" else ""
        return {"type": kind, "message": f"{error}{hint}"}
    return faults.describe(error)


def body_of(error: HttpError) -> Mapping[str, Any]:
    """What an answer says."""
    return error.body if isinstance(error, ServiceProblem) else {"error": described_error(error)}
