"""Answers that are written piece by piece: server-sent events and lines of JSON.

Parts: `StreamedAnswer`, `sse`, `json_line`. Invariant: a slow client holds up its own stream and nothing else, and when
it has gone the pieces' generator is closed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

EVENT_STREAM: Final = "text/event-stream"
JSON_LINES: Final = "application/x-ndjson"


class StreamedAnswer(Response):
    """Sends `first`, where there is one, and then what `pieces` yields.

    Take the first piece from the generator yourself where it may be refused: before it, a status can still say so.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        media_type: str = EVENT_STREAM,
        *,
        first: bytes = b"",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = status
        self.media_type = media_type
        self.background = None
        self.init_headers({"cache-control": "no-cache", **(headers or {})})
        self.pieces, self.first = pieces, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.pieces):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self.first:
                await send({"type": "http.response.body", "body": self.first, "more_body": True})
            async for piece in self.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def sse(data: Mapping[str, Any] | str, event: str | None = None) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


def json_line(value: Any) -> bytes:
    """One line of NDJSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
