"""Security headers and the Host check, as ASGI middleware.

What is shown (rollout text, logs, errors) is hostile: the content security policy lets no inline script or style run
and nothing load from elsewhere. On a loopback address only loopback names are answered, so that a page elsewhere
cannot read runs by pointing its own name at 127.0.0.1.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class SecurityMiddleware:
    """Adds `HEADERS` to every answer; refuses a Host outside `allowed_hosts` (None allows all)."""

    def __init__(self, app: ASGIApp, allowed_hosts: frozenset[str] | None) -> None:
        self.app = app
        self.allowed_hosts = allowed_hosts

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
            await send(message)

        host = host_name(Headers(scope=scope).get("host", ""))
        if self.allowed_hosts is not None and host not in self.allowed_hosts:
            refusal = PlainTextResponse(f"This server does not answer to the name {host!r}.", status_code=400)
            await refusal(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)


def host_name(header: str) -> str:
    """The host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()
