"""Weights, pausing, health and metrics: what a run's supervisor and orchestrator ask of a server.

Whoever may change weights or pause the engine has the admin key, which a run makes for itself; a server that was
started without one does neither. Health and figures are for anybody on the machine.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from mettle.inference.adapters import check_adapter_name
from mettle.inference.bodies import PauseBody, WeightsBody
from mettle.inference.engine.protocol import WeightsRejected
from mettle.inference.service import service_of
from mettle.records.versions import CanaryCheck
from mettle.web.app import Row
from mettle.web.bodies import checked, read_body, read_model
from mettle.web.figures import metrics_page
from mettle.web.problems import HttpError, json_response, openai_body

_MAX_BYTES: Final = 64 << 10


async def update_weights(request: Request) -> Response:
    """200 once the version is served and proven; 409, and the old weights stay, when it is refused."""
    service = service_of(request)
    engine = service.engine
    body = await read_model(request, WeightsBody, max_bytes=_MAX_BYTES)
    try:
        if body.adapter is None:
            update = await asyncio.to_thread(engine.update_weights, Path(body.path), body.version)
        else:
            check_adapter_name(service, body.adapter, "adapter")
            update = await asyncio.to_thread(engine.load_adapter, body.adapter, Path(body.path), body.version)
    except WeightsRejected as error:
        refused = openai_body(HttpError(409, str(error), code="weights_rejected"))
        return json_response({**refused, "canary": _canary(error.canary)}, status=409)
    return json_response(
        {
            "version": update.version,
            "load_ms": update.load_ms,
            "swap_ms": update.swap_ms,
            "canary": _canary(update.canary),
        }
    )


async def pause(request: Request) -> Response:
    """200 once nothing is sampled any more."""
    asked = checked(PauseBody, await read_body(request, max_bytes=_MAX_BYTES) or b"{}").mode
    mode = request.query_params.get("mode") or asked or "keep"
    if mode not in ("keep", "drain"):
        raise HttpError(400, f"mode must be 'keep' or 'drain', not {mode!r}", param="mode")
    await asyncio.to_thread(service_of(request).engine.pause, "drain" if mode == "drain" else "keep")
    return json_response({"paused": True, "mode": mode})


async def resume(request: Request) -> Response:
    """Go on sampling."""
    await asyncio.to_thread(service_of(request).engine.resume)
    return json_response({"paused": False})


async def health(request: Request) -> Response:
    """200 while requests are taken, 503 when the engine has ended or the server is about to."""
    service = service_of(request)
    status = service.engine.status()
    is_ok = status.is_alive and not service.is_stopping
    body = {
        "status": "ok" if is_ok else "stopping",
        "version": status.version,
        "model": service.model_name,
        "running": status.num_running,
        "waiting": status.num_waiting,
        "paused": status.is_paused,
        "kv_bytes": status.kv_bytes,
        "kv_budget_bytes": status.kv_budget_bytes,
        "preempted": status.total_preempted,
        "dtype": status.dtype,
        "canary_tolerance": status.canary_tolerance,
    }
    return json_response(body, status=200 if is_ok else 503)


async def status(request: Request) -> Response:
    """All that the engine says of itself: what a server in front of this one has to know."""
    return json_response(asdict(service_of(request).engine.status()))


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return metrics_page(service_of(request).metrics.registry)


def _canary(check: CanaryCheck | None) -> dict[str, Any] | None:
    if check is None:
        return None
    fields = asdict(check)
    del fields["version"]
    # JSON has no NaN; a canary that gave none is as far off as can be.
    return {key: value if value == value else None for key, value in fields.items()}


ROUTES: list[Row] = [
    ("POST", "/admin/weights", update_weights, "admin"),
    ("POST", "/admin/pause", pause, "admin"),
    ("POST", "/admin/resume", resume, "admin"),
    ("GET", "/admin/status", status, "admin"),
    ("GET", "/health", health, "anybody"),
    ("GET", "/metrics", metrics, "anybody"),
]
