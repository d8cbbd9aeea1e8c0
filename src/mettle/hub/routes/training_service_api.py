"""The training service of each base model under `/train/NAME`: what the `tinker` SDK takes as its base URL."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from mettle.hub.access import LabHere

router = APIRouter(prefix="/train", include_in_schema=False)


@router.api_route("/{name}/api/v1/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
async def pass_on(request: Request, lab: LabHere, name: str, path: str) -> Response:
    """Passed on to the process of the model, which speaks the SDK's format."""
    from mettle.hub.training_service.proxy import TrainingProxy  # here, because no start is to wait for it

    state = request.app.state
    if state.training_proxy is None:
        state.training_proxy = TrainingProxy(lab)
    proxy: TrainingProxy = state.training_proxy
    return await proxy.passed_on(request, name, path)
