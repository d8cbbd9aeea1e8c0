"""What all routes share: the engine behind its bridge, the tokenizer, the model's name, and the metrics."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from mettle.clients.renderer import Renderer
from mettle.inference.api_errors import ApiError, bad_request
from mettle.inference.bridge import Bridge
from mettle.inference.engine.protocol import Engine, Generation, GenerationRequest, RequestRefused, TokenEvent
from mettle.inference.metrics import RequestMetrics


@dataclass
class Service:
    """One served model. `is_stopping` turns new requests away while the running ones finish."""

    bridge: Bridge
    renderer: Renderer
    model_name: str
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex
    clock: Callable[[], float] = time.time
    created: int = field(default=0)
    is_stopping: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __post_init__(self) -> None:
        self.created = self.created or int(self.clock())

    @property
    def engine(self) -> Engine:
        """The engine itself, for calls that block: use them in a thread."""
        return self.bridge.engine

    def check_model(self, name: object) -> None:
        """Refuse a request for another model; no name means this one."""
        if name is not None and name != self.model_name:
            message = f"model {name!r} is not served here; {self.model_name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def generate(self, request: GenerationRequest, prompt_field: str) -> Generation:
        """A whole generation; a complaint about the prompt names `prompt_field`."""
        self._check_open()
        with _naming(prompt_field), self.metrics.timed():
            return await self.bridge.generate(request)

    async def stream(self, request: GenerationRequest, prompt_field: str) -> AsyncGenerator[TokenEvent | Generation]:
        """A generation token by token. A request that is refused is so before the first item."""
        self._check_open()
        with _naming(prompt_field), self.metrics.timed():
            async with aclosing(self.bridge.stream(request)) as items:
                async for item in items:
                    yield item

    def _check_open(self) -> None:
        if self.is_stopping:
            raise ApiError(503, "the server is shutting down", code="stopping")


@contextmanager
def _naming(prompt_field: str) -> Iterator[None]:
    try:
        yield
    except RequestRefused as error:
        param = prompt_field if error.parameter == "prompt_ids" else error.parameter
        raise bad_request(str(error), param, error.code) from error


SERVICE = web.AppKey("service", Service)
"""Where a handler finds the service: `request.app[SERVICE]`."""
