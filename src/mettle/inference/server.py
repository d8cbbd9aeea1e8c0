"""The HTTP server: all routes over one service, and its life from a bound socket to a drained stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable

from aiohttp import web

from mettle.errors import UserError
from mettle.inference import admin, chat, completions, generate, tokens
from mettle.inference.api_errors import answer_errors
from mettle.inference.service import SERVICE, Service

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 2**20
_HANDLERS_S = 1.0


def build_app(service: Service) -> web.Application:
    """An application with every route."""
    app = web.Application(middlewares=[answer_errors], client_max_size=_MAX_BODY_BYTES)
    app[SERVICE] = service
    for room in (generate, chat, completions, tokens, admin):
        app.add_routes(room.ROUTES)
    return app


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises: UserError when the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {host} is in use; give another with --port, or 0 for any free one"
            ) from error
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for any"
        ) from error
    listener.setblocking(False)
    return listener


class Server:
    """A service on a socket. Handlers of clients that go away are cancelled, which aborts their requests."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self.service = service
        self.host, self.port = listener.getsockname()[:2]
        self._listener = listener
        self._runner = web.AppRunner(
            build_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=_HANDLERS_S
        )

    @property
    def base_url(self) -> str:
        """What an OpenAI client calls the base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    async def start(self) -> None:
        """Answer requests from now on."""
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()

    async def stop(self, drain_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Turn new requests away, give the running ones `drain_s`, then abort them. The engine is closed too."""
        service = self.service
        service.is_stopping = True
        deadline = clock() + drain_s
        while clock() < deadline:
            status = service.engine.status()
            if not status.is_alive or status.is_paused or not status.num_running + status.num_waiting:
                break
            await asyncio.sleep(0.02)
        await asyncio.to_thread(service.engine.close)
        await self._runner.cleanup()
