"""Weights, pausing, health and metrics: what a run's supervisor and orchestrator ask of a server.

These routes have no password: whoever can reach the server may change its weights. It listens on 127.0.0.1 by default.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from mettle.inference.api_errors import ApiError, bad_request, error_body, json_response
from mettle.inference.engine.protocol import PauseMode, WeightsRejected
from mettle.inference.metrics import prometheus_text
from mettle.inference.request_body import read_body
from mettle.inference.service import SERVICE
from mettle.records.versions import CanaryCheck


async def update_weights(request: web.Request) -> web.Response:
    """200 once the version is served and proven; 409, and the old weights stay, when it is refused."""
    service = request.app[SERVICE]
    body = await read_body(request)
    version = body.integer("version", low=0)
    path = body.text("path")
    if version is None:
        raise bad_request("version is required: the number of the published weights", "version")
    if not path:
        raise bad_request("path is required: the folder of the published weights", "path")
    try:
        update = await asyncio.to_thread(service.engine.update_weights, Path(path), version)
    except WeightsRejected as error:
        refused = error_body(ApiError(409, str(error), code="weights_rejected"))
        return json_response({**refused, "canary": _canary(error.canary)}, status=409)
    return json_response(
        {
            "version": update.version,
            "load_ms": update.load_ms,
            "swap_ms": update.swap_ms,
            "canary": _canary(update.canary),
        }
    )


async def pause(request: web.Request) -> web.Response:
    """200 once nothing is sampled any more."""
    service = request.app[SERVICE]
    body = await read_body(request) if request.can_read_body else None
    mode = request.query.get("mode") or (body.text("mode") if body is not None else None) or "keep"
    if mode not in ("keep", "drain"):
        raise bad_request(f"mode must be 'keep' or 'drain', not {mode!r}", "mode")
    chosen: PauseMode = "drain" if mode == "drain" else "keep"
    await asyncio.to_thread(service.engine.pause, chosen)
    return json_response({"paused": True, "mode": chosen})


async def resume(request: web.Request) -> web.Response:
    """Go on sampling."""
    await asyncio.to_thread(request.app[SERVICE].engine.resume)
    return json_response({"paused": False})


async def health(request: web.Request) -> web.Response:
    """200 while requests are taken, 503 when the engine has ended or the server is about to."""
    service = request.app[SERVICE]
    status = service.engine.status()
    is_ok = status.is_alive and not service.is_stopping
    body = {
        "status": "ok" if is_ok else "stopping",
        "version": status.version,
        "model": service.model_name,
        "running": status.num_running,
        "waiting": status.num_waiting,
        "paused": status.is_paused,
    }
    return json_response(body, status=200 if is_ok else 503)


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text."""
    service = request.app[SERVICE]
    text = prometheus_text(service.engine.status(), service.metrics)
    return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _canary(check: CanaryCheck | None) -> dict[str, Any] | None:
    if check is None:
        return None
    fields = asdict(check)
    del fields["version"]
    # JSON has no NaN; a canary that gave none is as far off as can be.
    return {key: value if value == value else None for key, value in fields.items()}


ROUTES = [
    web.post("/admin/weights", update_weights),
    web.post("/admin/pause", pause),
    web.post("/admin/resume", resume),
    web.get("/health", health),
    web.get("/metrics", metrics),
]
