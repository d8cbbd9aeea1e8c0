"""The HTTP server: all routes over one service, and its life from a bound socket to a drained stop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final

from mettle.inference import adapters, admin, chat, completions, generate, tokens
from mettle.inference.service import ModelService, as_http_error
from mettle.web.app import WebApp, routed
from mettle.web.doors import Door, allowed_hosts
from mettle.web.keys import Keys
from mettle.web.problems import openai_body
from mettle.web.server import HttpServer, url_of

ROUTES = [*generate.ROUTES, *chat.ROUTES, *completions.ROUTES, *tokens.ROUTES, *admin.ROUTES, *adapters.ROUTES]
NO_KEYS: Final = Keys()
_HANDLERS_S: Final = 1.0


class InferenceServer:
    """A service on a socket. Handlers of clients that go away are cancelled, which aborts their requests.

    `names` are those that the server is called by, besides the loopback's, where it listens there. `keys` open its
    routes: the admin routes never without one.
    """

    def __init__(
        self, service: ModelService, listener: socket.socket, names: Iterable[str] = (), keys: Keys = NO_KEYS
    ) -> None:
        self.service = service
        self.host, self.port = listener.getsockname()[:2]
        app = WebApp(
            routed(ROUTES),
            door=Door(allowed_hosts(self.host, names), keys),
            error_body=openai_body,
            as_error=as_http_error,
            service=service,
        )
        self._http = HttpServer(app, listener)

    @property
    def base_url(self) -> str:
        """What an OpenAI client calls the base URL."""
        return f"{url_of(self.host, self.port)}/v1"

    async def start(self) -> None:
        """Answer requests from now on."""
        await self._http.start()

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
        await self._http.stop(_HANDLERS_S)
