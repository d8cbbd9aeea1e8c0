"""Operations of models: each is accepted and answered with a promise, whatever is wrong with it beyond its number.

Invariant: a request that names a model of theirs and a number uses that number up; what is wrong is told by its future,
so that no client waits for a number that was never taken.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from mettle.errors import UserError
from mettle.trainer.service.bodies import Body, CreateModelBody, LoadBody, OptimStepBody, SaveBody, read_body_of
from mettle.trainer.service.records import AdapterSpec, Kind, TrainedModel
from mettle.trainer.service.routes.futures import PROTOBUF
from mettle.trainer.service.service import TrainingService, canonical, service_of
from mettle.trainer.service.wire import messages
from mettle.trainer.service.wire.bodies import unpacked
from mettle.trainer.service.wire.orders import message_of_json
from mettle.web.bodies import json_object, read_body, read_json
from mettle.web.doors import MAX_BODY_BYTES
from mettle.web.problems import HttpError, json_response

_MAX_SEQ: Final = 2**31 - 1
_CHECKED: Final[dict[str, type[Body]]] = {
    "optim_step": OptimStepBody,
    "save_weights": SaveBody,
    "save_weights_for_sampler": SaveBody,
    "save_weights_external": SaveBody,
    "load_weights": LoadBody,
}


async def create_model(request: Request) -> Response:
    """A new adapter. Its number in the session makes its id."""
    service = service_of(request)
    owner = service.owner(request)
    body = await read_json(request)
    session_id = service.session_of(body.get("session_id"), owner)
    asked = read_body_of(CreateModelBody, body)
    service.check_base(asked.base_model)
    lora = asked.lora_config
    if lora.rank > service.config.max_rank:
        raise UserError(f"lora_config.rank: {lora.rank} is above the {service.config.max_rank} that are taken here")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise UserError("lora_config: one of train_attn, train_mlp and train_unembed must be on")
    seed = secrets.randbits(31) if lora.seed is None else lora.seed
    spec = AdapterSpec(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
    model = _new_model(service, owner, session_id, asked.model_seq_id, spec, asked.user_metadata)
    return json_response(service.accept_training("create_model", model, 0, canonical(body)))


async def load_weights(request: Request) -> Response:
    """Weights into a model, or, with a session in place of a model, a new model of them."""
    service = service_of(request)
    owner = service.owner(request)
    body = await read_json(request)
    if body.get("model_id") is not None:
        return _accept_json(service, owner, "load_weights", body)
    session_id = service.session_of(body.get("session_id"), owner)
    asked = read_body_of(LoadBody, body)
    if asked.model_seq_id is None:
        raise HttpError(400, "model_seq_id: a number is needed where there is no model_id")
    saved = service.weights_at(asked.path, owner)
    assert saved.spec is not None, "weights are saved with their spec"
    model = _new_model(service, owner, session_id, asked.model_seq_id, saved.spec, asked.user_metadata)
    return json_response(service.accept_training("load_weights", model, 0, canonical(body)))


async def forward(request: Request) -> Response:
    """Log-probabilities and loss, as older clients ask for them."""
    return await _pass(request, "forward_input", is_forward_only=True)


async def forward_backward(request: Request) -> Response:
    """The same with the gradient added; protobuf or JSON."""
    return await _pass(request, "forward_backward_input", is_forward_only=False)


async def _pass(request: Request, part: str, *, is_forward_only: bool) -> Response:
    service = service_of(request)
    owner = service.owner(request)
    packed = await read_body(request)
    data = unpacked(packed, request.headers.get("content-encoding", ""), max_bytes=MAX_BODY_BYTES)
    kind: Kind = "forward" if is_forward_only else "forward_backward"
    refusal = service.refusal(request)
    if request.headers.get("content-type", "").startswith(PROTOBUF):
        message = messages.parse(messages.ForwardBackwardRequest, data)
        model, seq_id = service.model_of(message.model_id, owner), _number(message.seq_id)
        service.check_quota(owner, f"{model.model_id}:{seq_id}")
        if refusal:
            return json_response(service.accept_training("refused", model, seq_id, refusal.encode()))
        if message.forward_only:
            kind = "forward"
        return json_response(service.accept_training(kind, model, seq_id, messages.encode(message)))
    body = json_object(data)
    model, seq_id = service.model_of(body.get("model_id"), owner), _number(body.get("seq_id"))
    service.check_quota(owner, f"{model.model_id}:{seq_id}")
    try:
        if refusal:
            raise UserError(refusal)
        content = messages.encode(message_of_json(body, part, is_forward_only=is_forward_only))
    except UserError as error:
        kind, content = "refused", str(error).encode()
    return json_response(service.accept_training(kind, model, seq_id, content))


def _json_route(kind: Kind) -> Callable[[Request], Awaitable[Response]]:
    async def accept(request: Request) -> Response:
        service = service_of(request)
        owner = service.owner(request)
        return _accept_json(service, owner, kind, await read_json(request))

    return accept


async def unload_model(request: Request) -> Response:
    """Free a model's memory, as soon as nothing of it runs. It has no number."""
    service = service_of(request)
    owner = service.owner(request)
    model = service.model_of((await read_json(request)).get("model_id"), owner)
    service.worker.free([model.model_id])
    result = canonical({"type": "unload_model", "model_id": model.model_id})
    return json_response({"request_id": service.settled("unload_model", model, result), "model_id": model.model_id})


async def get_info(request: Request) -> Response:
    """What a model is, at once."""
    service = service_of(request)
    owner = service.owner(request)
    model = service.model_of((await read_json(request)).get("model_id"), owner)
    return json_response(
        {
            "type": "get_info",
            "model_id": model.model_id,
            "model_data": {"model_name": model.base_model, "tokenizer_id": service.tokenizer_id},
            "is_lora": True,
            "lora_rank": model.spec.rank,
            "model_name": model.base_model,
            "optimizer_config": {"type": "adamw"},
        }
    )


def _accept_json(service: TrainingService, owner: str, kind: Kind, body: dict[str, Any]) -> Response:
    model, seq_id = service.model_of(body.get("model_id"), owner), _number(body.get("seq_id"))
    service.check_quota(owner, f"{model.model_id}:{seq_id}")
    content = canonical(body)
    try:
        read_body_of(_CHECKED[kind], content)
    except UserError as error:
        kind, content = "refused", str(error).encode()
    return json_response(service.accept_training(kind, model, seq_id, content))


def _number(value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_SEQ:
        raise HttpError(400, f"seq_id: a whole number from 1 is needed, got {str(value)[:40]!r}")
    return value


def _new_model(
    service: TrainingService,
    owner: str,
    session_id: str,
    number: int,
    spec: AdapterSpec,
    metadata: dict[str, Any] | None,
) -> TrainedModel:
    """The row of a model; one that is there already is answered with itself."""
    model_id = f"{session_id}:train:{number}"
    known = service.store.model(model_id, owner)
    if known is not None:
        return known
    num_models = service.store.num_living_models(owner)
    if num_models >= service.config.max_models:
        raise HttpError(
            403, f"this key has {num_models} models in living sessions and may have {service.config.max_models}"
        )
    now = service.store.clock()
    base = service.config.model_name
    model = TrainedModel(model_id, session_id, owner, base, spec, metadata or {}, now, now, -1, -1, "")
    service.store.add_model(model)
    return model


ROUTES = [
    ("POST", "/api/v1/create_model", create_model, "anybody"),
    ("POST", "/api/v1/load_weights", load_weights, "anybody"),
    ("POST", "/api/v1/forward", forward, "anybody"),
    ("POST", "/api/v1/forward_backward", forward_backward, "anybody"),
    ("POST", "/api/v1/optim_step", _json_route("optim_step"), "anybody"),
    ("POST", "/api/v1/save_weights", _json_route("save_weights"), "anybody"),
    ("POST", "/api/v1/save_weights_for_sampler", _json_route("save_weights_for_sampler"), "anybody"),
    ("POST", "/api/v1/save_weights_external", _json_route("save_weights_external"), "anybody"),
    ("POST", "/api/v1/unload_model", unload_model, "anybody"),
    ("POST", "/api/v1/get_info", get_info, "anybody"),
]
