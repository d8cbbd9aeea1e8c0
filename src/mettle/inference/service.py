"""What all routes share: the engine behind its bridge, the tokenizer, the model's name, and the metrics."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from starlette.requests import Request

from mettle.clients.renderer import Renderer
from mettle.errors import MettleError, UserError
from mettle.inference.bridge import Bridge
from mettle.inference.engine.protocol import (
    EngineBusy,
    EngineStopped,
    Generation,
    GenerationRequest,
    RequestRefused,
    SamplingEngine,
    TokenEvent,
)
from mettle.inference.metrics import ServingMetrics
from mettle.web.problems import HttpError


class ModelChoice(NamedTuple):
    """The adapter that a request is for, "" being the base, and its version where one is pinned."""

    adapter: str
    version: int | None


def counted_ids() -> Callable[[], str]:
    """Names of 32 hexadecimal digits that no other process gives: drawn once, then counted.

    A draw for each request asks the system, and gives the interpreter to the engine's thread until that lets go of it.
    """
    drawn, numbers = uuid.uuid4().hex[:20], count()
    return lambda: f"{drawn}{next(numbers):012x}"


@dataclass
class ModelService:
    """One served model with its adapters. `is_stopping` turns new requests away while the running ones finish."""

    bridge: Bridge
    renderer: Renderer
    model_name: str
    new_id: Callable[[], str] = field(default_factory=counted_ids)
    clock: Callable[[], float] = time.time
    created: int = field(default=0)
    is_stopping: bool = False

    def __post_init__(self) -> None:
        self.created = self.created or int(self.clock())
        self.metrics = ServingMetrics(self.engine.status)
        self.aliases: dict[str, str] = {}
        """What clients call their running requests, to the engine's names."""

    @property
    def engine(self) -> SamplingEngine:
        """The engine itself, for calls that block: use them in a thread."""
        return self.bridge.engine

    def find_model(self, name: object) -> ModelChoice:
        """What a name means: the model itself, as does none, an adapter, or `ADAPTER@vN`, one version of it.

        Raises: HttpError for a name that is not served here.
        """
        if name is None or name == self.model_name:
            return ModelChoice("", None)
        adapters = {adapter.name: adapter for adapter in self.engine.status().adapters}
        if isinstance(name, str):
            adapter, _, version = name.partition("@v")
            if name in adapters:
                return ModelChoice(name, None)
            if adapter in adapters and version.isdecimal() and version.isascii() and len(version) < 10:
                return ModelChoice(adapter, int(version))
        served = " or ".join(repr(known) for known in (self.model_name, *adapters))
        message = f"model {name!r} is not served here; {served} is"
        raise HttpError(404, message, param="model", code="model_not_found")

    def name_of(self, request: GenerationRequest) -> str:
        """The model's name in the answer to a request."""
        pinned = "" if request.adapter_version is None else f"@v{request.adapter_version}"
        return f"{request.adapter}{pinned}" if request.adapter else self.model_name

    @contextmanager
    def known_as(self, alias: str | None, request_id: str) -> Iterator[None]:
        """While the block runs a client may end the request by a name of its own.

        Raises: HttpError 409 when another request has that name.
        """
        if alias is None:
            yield
            return
        if self.aliases.setdefault(alias, request_id) != request_id:
            raise HttpError(409, f"a request {alias!r} runs already", param="request_id", code="request_exists")
        try:
            yield
        finally:
            self.aliases.pop(alias, None)

    async def generate(self, request: GenerationRequest, prompt_field: str) -> Generation:
        """A whole generation; a complaint about the prompt names `prompt_field`."""
        self._check_open()
        with _naming(prompt_field), self.metrics.request_seconds.time():
            return await self.bridge.generate(request)

    async def stream(self, request: GenerationRequest, prompt_field: str) -> AsyncGenerator[TokenEvent | Generation]:
        """A generation token by token. A request that is refused is so before the first item."""
        self._check_open()
        with _naming(prompt_field), self.metrics.request_seconds.time():
            async with aclosing(self.bridge.stream(request)) as items:
                async for item in items:
                    yield item

    def _check_open(self) -> None:
        if self.is_stopping:
            raise HttpError(503, "the server is shutting down", code="stopping")


def service_of(request: Request) -> ModelService:
    """The service that a request is for."""
    service: ModelService = request.app.state.service
    return service


def as_http_error(error: Exception) -> HttpError | None:
    """What an error of ours is as an answer."""
    match error:
        case RequestRefused(code="model_not_found"):
            return HttpError(404, str(error), param=error.parameter, code=error.code)
        case RequestRefused():
            return HttpError(400, str(error), param=error.parameter, code=error.code)
        case EngineBusy():
            return HttpError(429, str(error), code="queue_full")
        case EngineStopped():
            return HttpError(503, str(error), code="stopping")
        case UserError():
            return HttpError(400, str(error))
        case MettleError():
            return HttpError(500, str(error), code="engine_failed")
    return None


@contextmanager
def _naming(prompt_field: str) -> Iterator[None]:
    try:
        yield
    except RequestRefused as error:
        param = prompt_field if error.parameter == "prompt_ids" else error.parameter
        status = 404 if error.code == "model_not_found" else 400
        raise HttpError(status, str(error), param=param, code=error.code) from error
