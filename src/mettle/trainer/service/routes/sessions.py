"""Sessions, what the server is, and what clients tell about themselves."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mettle.trainer.service.service import service_of
from mettle.web.bodies import read_json
from mettle.web.problems import json_response


async def healthz(request: Request) -> Response:
    """Is it up?"""
    return json_response({"status": "ok"})


async def client_config(request: Request) -> Response:
    """Flags that clients obey; what is left out is as their makers have it."""
    service_of(request).owner(request)
    return json_response({"pjwt_auth_enabled": False, "proto_compress_fwdbwd": True})


async def dynamic_config(request: Request) -> Response:
    """Flags that clients ask for again now and then."""
    service_of(request).owner(request)
    flags = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}
    return json_response(flags)


async def capabilities(request: Request) -> Response:
    """The models that are served: one."""
    service = service_of(request)
    service.owner(request)
    model = {
        "model_name": service.config.model_name,
        "max_context_length": service.max_length,
        "trainable": True,
        "sampleable": True,
    }
    return json_response({"supported_models": [model]})


async def create_session(request: Request) -> Response:
    """One client program begins."""
    service = service_of(request)
    owner = service.owner(request)
    body = await read_json(request)
    session_id = service.new_session_id()
    kept = ("tags", "user_metadata", "sdk_version", "project_id", "display_name")
    service.store.add_session(session_id, owner, {name: body.get(name) for name in kept})
    return json_response({"type": "create_session", "session_id": session_id})


async def session_heartbeat(request: Request) -> Response:
    """It is alive."""
    service = service_of(request)
    owner = service.owner(request)
    body = await read_json(request)
    service.store.see_session(service.session_of(body.get("session_id"), owner))
    return json_response({"type": "session_heartbeat"})


async def finish_session(request: Request) -> Response:
    """It has ended."""
    service = service_of(request)
    owner = service.owner(request)
    session_id = service.session_of(request.path_params["session_id"], owner)
    service.end_session(session_id)
    return json_response({})


async def telemetry(request: Request) -> Response:
    """Taken and forgotten, whoever sends it: a client that cannot deliver this keeps its user waiting."""
    return json_response({"status": "accepted"})


async def usage(request: Request) -> Response:
    """What each owner has taken, for the Hub that this service is part of."""
    owners = [asdict(each) for each in service_of(request).store.usage()]
    return json_response({"owners": owners})


async def list_sessions(request: Request) -> Response:
    """Their sessions, newest first."""
    service = service_of(request)
    sessions = service.store.sessions(service.owner(request))
    offset, limit = page_of(request)
    return json_response({"sessions": [each.session_id for each in sessions[offset : offset + limit]]})


async def get_session(request: Request) -> Response:
    """One session: its models and samplers."""
    service = service_of(request)
    owner = service.owner(request)
    session_id = service.session_of(request.path_params["session_id"], owner)
    session = service.store.session(session_id, owner)
    assert session is not None, "it was found"
    metadata: dict[str, Any] = dict(session.metadata)
    return json_response(
        {
            "training_run_ids": service.store.models_of_session(session_id),
            "sampler_ids": [each.sampler_id for each in service.store.samplers_of_session(session_id)],
            "user_metadata": metadata.get("user_metadata"),
            "display_name": metadata.get("display_name"),
        }
    )


def page_of(request: Request, default: int = 100) -> tuple[int, int]:
    """`offset` and `limit` of a list; what is no number counts as left out."""

    def number(name: str, otherwise: int) -> int:
        text = request.query_params.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else otherwise

    return number("offset", 0), min(number("limit", default), 1000)


ROUTES = [
    ("GET", "/api/v1/healthz", healthz, "anybody"),
    ("POST", "/api/v1/client/config", client_config, "anybody"),
    ("POST", "/api/v1/client/dynamic_config", dynamic_config, "anybody"),
    ("GET", "/api/v1/get_server_capabilities", capabilities, "anybody"),
    ("POST", "/api/v1/create_session", create_session, "anybody"),
    ("POST", "/api/v1/session_heartbeat", session_heartbeat, "anybody"),
    ("POST", "/api/v1/sessions/{session_id}/finish", finish_session, "anybody"),
    ("POST", "/api/v1/telemetry", telemetry, "anybody"),
    ("GET", "/admin/usage", usage, "admin"),
    ("GET", "/api/v1/sessions", list_sessions, "anybody"),
    ("GET", "/api/v1/sessions/{session_id}", get_session, "anybody"),
]
