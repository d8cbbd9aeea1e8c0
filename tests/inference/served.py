"""An engine behind HTTP, in a thread of its own: for what talks to a server and blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mettle.clients.renderer import Renderer
from mettle.inference.bridge import Bridge
from mettle.inference.engine.protocol import SamplingEngine
from mettle.inference.server import InferenceServer
from mettle.inference.service import ModelService
from mettle.web.keys import Keys
from mettle.web.server import bind

KEYS = Keys(api="for requests", admin="of the tests")


@contextmanager
def served(engine: SamplingEngine, renderer: Renderer) -> Iterator[str]:
    """The base URL of a server with the engine, which is closed with it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> InferenceServer:
        running = InferenceServer(ModelService(Bridge(engine), renderer, "policy"), bind("127.0.0.1", 0), keys=KEYS)
        await running.start()
        return running

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield server.base_url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
