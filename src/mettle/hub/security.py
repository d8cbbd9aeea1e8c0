"""Security headers, and the door that every server of ours has (`mettle.web.doors`), as ASGI middleware.

What is shown (rollout text, logs, errors) is hostile: the content security policy lets no inline script or style run
and nothing load from elsewhere. On a loopback address only loopback names are answered, so that a page elsewhere
cannot read runs by pointing its own name at 127.0.0.1.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mettle.web.doors import Door

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer a browser sends its forms from the origin "null"
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class SecurityMiddleware:
    """Adds `HEADERS` to every answer, refuses what the door does not let in, and answers HEAD as GET without a body."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self.app = app
        self.door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if "cache-control" not in headers:
                    headers["cache-control"] = "no-store"
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        is_head = scope["method"] == "HEAD"
        refused = self.door.refusal(scope)
        if refused is not None:
            answer = PlainTextResponse(str(refused), status_code=refused.status)
            await answer(scope, receive, send_with_headers)
            return
        if is_head:  # FastAPI's routes know GET alone
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send_with_headers)
