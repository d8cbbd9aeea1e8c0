"""Adapters by the field's routes: load one under a model name of its own, and unload it. Both want the admin key.

What is loaded is listed by `/v1/models`, and chosen by its name in `model`; `NAME@v3` pins one version of it. A folder
is refused, and nothing changes, unless it is plain LoRA that fits the base.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from mettle.inference.bodies import LoadAdapterBody, UnloadAdapterBody
from mettle.inference.engine.protocol import WeightsRejected
from mettle.inference.service import ModelService, service_of
from mettle.web.app import Row
from mettle.web.bodies import read_model
from mettle.web.problems import HttpError, json_response

_MAX_BYTES: Final = 64 << 10


async def load_adapter(request: Request) -> Response:
    """200 once the adapter is served; a name that is served already is refused unless `load_inplace` is true."""
    service = service_of(request)
    body = await read_model(request, LoadAdapterBody, max_bytes=_MAX_BYTES)
    check_adapter_name(service, body.lora_name, "lora_name")
    if not body.load_inplace and body.lora_name in _names(service):
        message = f"adapter {body.lora_name!r} is served already; load_inplace serves this one as its next version"
        raise HttpError(400, message, param="lora_name")
    try:
        update = await asyncio.to_thread(service.engine.load_adapter, body.lora_name, Path(body.lora_path))
    except WeightsRejected as error:
        raise HttpError(400, str(error), param="lora_path", code="weights_rejected") from error
    return json_response({"lora_name": body.lora_name, "version": update.version, "load_ms": update.load_ms})


async def unload_adapter(request: Request) -> Response:
    """200 once no more requests are taken for it; those under way end under it."""
    service = service_of(request)
    body = await read_model(request, UnloadAdapterBody, max_bytes=_MAX_BYTES)
    if body.lora_name not in _names(service):
        message = f"adapter {body.lora_name!r} is not served"
        raise HttpError(404, message, param="lora_name", code="model_not_found")
    await asyncio.to_thread(service.engine.unload_adapter, body.lora_name)
    return json_response({"lora_name": body.lora_name})


def check_adapter_name(service: ModelService, name: str, field: str) -> None:
    """Raises: HttpError when an adapter cannot be called so, as the model itself is."""
    if name == service.model_name:
        raise HttpError(400, f"{name!r} is the name of the model itself", param=field)


def _names(service: ModelService) -> set[str]:
    return {adapter.name for adapter in service.engine.status().adapters}


ROUTES: list[Row] = [
    ("POST", "/v1/load_lora_adapter", load_adapter, "admin"),
    ("POST", "/v1/unload_lora_adapter", unload_adapter, "admin"),
]
