"""An engine behind HTTP, in a thread of its own: for what talks to a server and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.serving import on_a_loop

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

    async def start() -> InferenceServer:
        running = InferenceServer(ModelService(Bridge(engine), renderer, "policy"), bind("127.0.0.1", 0), keys=KEYS)
        await running.start()
        return running

    with on_a_loop() as run:
        server = run(start())
        try:
            yield server.base_url
        finally:
            run(server.stop(0))
