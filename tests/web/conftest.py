"""A server on the loopback with whatever routes a test gives it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from mettle.web.app import WebApp, routed
from mettle.web.doors import Door, allowed_hosts
from mettle.web.server import HttpServer, bind

Serve = Callable[..., Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a server with a table of routes; its URL. The server is `serve.last`."""
    servers: list[HttpServer] = []

    async def start(table: Any, *, options: Any = None, **app_options: Any) -> str:
        app_options.setdefault("door", Door(allowed_hosts("127.0.0.1")))
        listener = bind("127.0.0.1", 0)
        server = HttpServer(WebApp(routed(table), **app_options), listener, **(options or {}))
        start.last = server
        servers.append(server)
        port = listener.getsockname()[1]
        await server.start()
        return f"http://127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
