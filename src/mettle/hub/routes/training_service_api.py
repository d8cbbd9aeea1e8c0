"""The training service of each base model under `/train/NAME`: what the `tinker` SDK takes as its base URL."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

router = APIRouter(prefix="/train", include_in_schema=False)


@router.api_route("/{name}/api/v1/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
async def pass_on(request: Request, name: str, path: str) -> Response:
    """Passed on to the process of the model, which speaks the SDK's format."""
    return await request.app.state.training_proxy.passed_on(request, name, path)  # type: ignore[no-any-return]
