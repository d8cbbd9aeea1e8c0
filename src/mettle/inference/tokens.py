"""`/v1/models`, `/tokenize`, `/detokenize`: what is served, and how it reads text."""

from __future__ import annotations

from aiohttp import web

from mettle.inference.api_errors import ApiError, bad_request, json_response
from mettle.inference.request_body import read_body
from mettle.inference.service import SERVICE, Service


async def list_models(request: web.Request) -> web.Response:
    """The one model."""
    return json_response({"object": "list", "data": [_model(request.app[SERVICE])]})


async def get_model(request: web.Request) -> web.Response:
    """The model by its name."""
    service = request.app[SERVICE]
    service.check_model(request.match_info["name"])
    return json_response(_model(service))


async def tokenize(request: web.Request) -> web.Response:
    """Ids of `prompt`, or of `messages` under the chat template."""
    service = request.app[SERVICE]
    body = await read_body(request)
    service.check_model(body.get("model"))
    messages = body.objects("messages")
    prompt = body.text("prompt")
    if messages:
        ids = service.renderer.render(
            messages,
            body.objects("tools"),
            add_generation_prompt=body.boolean("add_generation_prompt", True),
        )
    elif prompt is not None:
        ids = service.renderer.encode(prompt, add_special_tokens=body.boolean("add_special_tokens", True))
    else:
        raise bad_request("give prompt, a string, or messages, a list", "prompt")
    return json_response({"count": len(ids), "max_model_len": service.engine.status().max_model_len, "tokens": ids})


async def detokenize(request: web.Request) -> web.Response:
    """Text of `tokens`, special tokens included."""
    service = request.app[SERVICE]
    body = await read_body(request)
    service.check_model(body.get("model"))
    ids = body.token_ids("tokens")
    try:
        text = service.renderer.decode(ids, skip_special_tokens=body.boolean("skip_special_tokens"))
    except OverflowError as error:
        raise ApiError(400, "tokens holds numbers that are no token ids", param="tokens") from error
    return json_response({"prompt": text})


def _model(service: Service) -> dict[str, object]:
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
    web.get("/v1/models", list_models),
    web.get("/v1/models/{name:.+}", get_model),
    web.post("/tokenize", tokenize),
    web.post("/detokenize", detokenize),
]
