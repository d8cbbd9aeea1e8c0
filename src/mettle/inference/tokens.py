"""`/v1/models`, `/tokenize`, `/detokenize`: what is served, and how it reads text."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mettle.inference.bodies import DetokenizeBody, TokenizeBody
from mettle.inference.service import ModelService, service_of
from mettle.web.bodies import read_model
from mettle.web.problems import HttpError, json_response


async def list_models(request: Request) -> Response:
    """The one model."""
    return json_response({"object": "list", "data": [_model(service_of(request))]})


async def get_model(request: Request) -> Response:
    """The model by its name."""
    service = service_of(request)
    service.check_model(request.path_params["name"])
    return json_response(_model(service))


async def tokenize(request: Request) -> Response:
    """Ids of `prompt`, or of `messages` under the chat template."""
    service = service_of(request)
    body = await read_model(request, TokenizeBody)
    service.check_model(body.model)
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
    service.check_model(body.model)
    try:
        text = service.renderer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    except OverflowError as error:
        raise HttpError(400, "tokens holds numbers that are no token ids", param="tokens") from error
    return json_response({"prompt": text})


def _model(service: ModelService) -> dict[str, object]:
    status = service.engine.status()
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "mettle",
        "max_model_len": status.max_model_len,
        "policy_version": status.version,
    }


ROUTES = [
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", get_model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
]
