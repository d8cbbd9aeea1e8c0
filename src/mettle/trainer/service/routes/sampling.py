"""Sampling sessions and samples."""

from __future__ import annotations

import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mettle.errors import UserError
from mettle.trainer.service.bodies import SampleBody, read_body_of
from mettle.trainer.service.records import Sampler
from mettle.trainer.service.service import canonical, service_of
from mettle.web.bodies import read_json
from mettle.web.problems import HttpError, json_response


async def create_sampling_session(request: Request) -> Response:
    """The base, or saved weights, to sample with."""
    service = service_of(request)
    owner = service.owner(request)
    body = await read_json(request)
    session_id = service.session_of(body.get("session_id"), owner)
    number = body.get("sampling_session_seq_id")
    if type(number) is not int or number < 0:
        raise HttpError(400, "sampling_session_seq_id: a whole number from 0 is needed")
    path = body.get("model_path") or ""
    if path:
        service.weights_at(path, owner)
    else:
        service.check_base(body.get("base_model"))
    sampler_id = f"{session_id}:sample:{number}"
    if service.store.sampler(sampler_id, owner) is None:
        base = service.config.model_name
        service.store.put_sampler(Sampler(sampler_id, session_id, owner, base, path, "", service.store.clock()))
    return json_response({"type": "create_sampling_session", "sampling_session_id": sampler_id})


async def get_sampler(request: Request) -> Response:
    """What a sampling session samples with."""
    service = service_of(request)
    owner = service.owner(request)
    sampler = service.store.sampler(request.path_params["sampler_id"], owner)
    if sampler is None:
        raise HttpError(404, f"there is no sampler {request.path_params['sampler_id'][:120]!r}")
    body: dict[str, Any] = {
        "sampler_id": sampler.sampler_id,
        "base_model": sampler.base_model,
        # Clients pass these two over: whether later saves change the weights, and how many have.
        "kind": "inflight" if sampler.is_inflight else "snapshot",
        "version": sampler.version,
    }
    return json_response(body | ({"model_path": sampler.model_path} if sampler.model_path else {}))


async def join_sampling_session(request: Request) -> Response:
    """A number of its own for one more client of a sampling session."""
    service = service_of(request)
    owner = service.owner(request)
    sampler_id = (await read_json(request)).get("sampling_session_id")
    if not isinstance(sampler_id, str) or service.store.sampler(sampler_id, owner) is None:
        raise HttpError(404, f"there is no sampling session {str(sampler_id)[:120]!r}")
    count = service.store.join_sampler(sampler_id)
    return json_response({"type": "join_sampling_session", "client_counter": count})


async def asample(request: Request) -> Response:
    """A sample; what is wrong with it is told by its future."""
    service = service_of(request)
    owner = service.owner(request)
    body = await read_json(request)
    sampler_id, number = body.get("sampling_session_id"), body.get("seq_id")
    session_id = ""
    request_id = f"sample-{secrets.token_hex(12)}"
    if sampler_id is not None:
        sampler = service.store.sampler(sampler_id, owner) if isinstance(sampler_id, str) else None
        if sampler is None:
            raise HttpError(404, f"there is no sampling session {str(sampler_id)[:120]!r}")
        session_id = sampler.session_id
        if type(number) is int:
            request_id = f"{sampler_id}:{number}"
    service.check_quota(owner, request_id)
    count = body.get("num_samples", 1)
    num = count if type(count) is int and 1 <= count <= service.config.max_sequences else 1
    try:
        if refusal := service.refusal(request):
            raise UserError(refusal)
        asked = read_body_of(SampleBody, body)
        if asked.num_samples > service.config.max_sequences:
            raise UserError(f"num_samples: at most {service.config.max_sequences} are drawn in one request")
    except UserError as error:
        return json_response(service.refuse_sample(owner, session_id, request_id, str(error), num))
    return json_response(service.accept_sample(owner, session_id, request_id, canonical(body), num))


ROUTES = [
    ("POST", "/api/v1/create_sampling_session", create_sampling_session, "anybody"),
    ("GET", "/api/v1/samplers/{sampler_id}", get_sampler, "anybody"),
    ("POST", "/api/v1/join_sampling_session", join_sampling_session, "anybody"),
    ("POST", "/api/v1/asample", asample, "anybody"),
]
