"""`/v1/models`, `/tokenize`, `/detokenize`: what is served, and how it reads text."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mettle.inference.bodies import DetokenizeBody, TokenizeBody
from mettle.inference.service import ModelService, service_of
from mettle.web.bodies import read_model
from mettle.web.problems import HttpError, json_response


async def list_models(request: Request) -> Response:
    """The model, then its adapters."""
    return json_response({"object": "list", "data": _models(service_of(request))})


async def get_model(request: Request) -> Response:
    """The model or the adapter of a name."""
    service = service_of(request)
    name = request.path_params["name"]
    adapter, version = service.find_model(name)
    found = next(model for model in _models(service) if model["id"] == (adapter or service.model_name))
    if version is not None:
        found |= {"id": name, "policy_version": version}
    return json_response(found)


async def tokenize(request: Request) -> Response:
    """Ids of `prompt`, or of `messages` under the chat template."""
    service = service_of(request)
    body = await read_model(request, TokenizeBody)
    service.find_model(body.model)
    if body.messages:
        ids = service.renderer.render(
            body.messages, body.tools, add_generation_prompt=body.add_generation_prompt is not False
        )
    elif body.prompt is not None:
        ids = service.renderer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        raise HttpError(400, "give prompt, a string, or messages, a list", param="prompt")
    return json_response({"count": len(ids), "max_model_len": service.engine.status().max_model_len, "tokens": ids})


async def detokenize(request: Request) -> Response:
    """Text of `tokens`, special tokens included."""
    service = service_of(request)
    body = await read_model(request, DetokenizeBody)
    service.find_model(body.model)
    try:
        text = service.renderer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    except OverflowError as error:
        raise HttpError(400, "tokens holds numbers that are no token ids", param="tokens") from error
    return json_response({"prompt": text})


def _models(service: ModelService) -> list[dict[str, Any]]:
    status = service.engine.status()
    shared = {
        "object": "model",
        "created": service.created,
        "owned_by": "mettle",
        "max_model_len": status.max_model_len,
    }
    models: list[dict[str, Any]] = [
        {"id": service.model_name, **shared, "policy_version": status.version, "forward_of": status.forward_of}
    ]
    for adapter in status.adapters:
        about = {"root": adapter.path, "parent": service.model_name, "versions": list(adapter.versions)}
        models.append({"id": adapter.name, **shared, "policy_version": adapter.newest, **about})
    return models


ROUTES = [
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", get_model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
]
