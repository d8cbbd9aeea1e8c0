"""Servers on threads of their own, for tests of what talks to one and blocks.

Parts: `on_a_loop` (an event loop that runs elsewhere), `app_on_a_thread` (an ASGI application), `handler_on_a_thread`
(a request handler of the standard library). Invariant: when the block ends there is neither server nor thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from starlette.types import ASGIApp

from mettle.web.server import HttpServer, bind, url_of

HOST = "127.0.0.1"
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@contextmanager
def on_a_loop() -> Iterator[Run]:
    """What runs a coroutine on the loop of another thread, and gives what it returns."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def app_on_a_thread(app: ASGIApp) -> Iterator[str]:
    """The address of a server that answers with `app`, on a free port."""
    listener = bind(HOST, 0)
    port = listener.getsockname()[1]
    with on_a_loop() as run:

        async def start() -> HttpServer:
            server = HttpServer(app, listener)
            await server.start()
            return server

        server = run(start())
        try:
            yield url_of(HOST, port)
        finally:
            run(server.stop())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A client that goes away in the middle of a request is part of the tests."""


@contextmanager
def handler_on_a_thread(handler: type[BaseHTTPRequestHandler], host: str = HOST) -> Iterator[str]:
    """The address of a server whose requests `handler` answers, on a free port."""
    server = _Server((host, 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield url_of(host, server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
