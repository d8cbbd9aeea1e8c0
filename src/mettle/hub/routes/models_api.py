"""The Hub's models over the OpenAI API, under `/v1`: for programs that know no Hub."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from mettle.hub.access import EvalWriter, LabHere
from mettle.hub.serving.models import HubModel, find_model, list_models
from mettle.web.bodies import read_json
from mettle.web.problems import HttpError

router = APIRouter(prefix="/v1", tags=["models"])
MAX_ASKED_BYTES = 16 << 20


@router.get("/models")
def models(lab: LabHere, caller: EvalWriter) -> dict[str, Any]:
    """The models that the caller may ask for."""
    with lab.database.read() as c:
        found = list_models(c, lab, caller)
    return {"object": "list", "data": [_shown(each) for each in found]}


@router.get("/models/{name}")
def one_model(lab: LabHere, caller: EvalWriter, name: str) -> dict[str, Any]:
    """One of them."""
    with lab.database.read() as c:
        return _shown(find_model(c, lab, caller, name))


def _shown(model: HubModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": 0, "owned_by": model.title}


@router.post("/chat/completions")
async def chat_completions(request: Request, lab: LabHere, caller: EvalWriter) -> Response:
    """The next message of a conversation; with `stream` as it is written."""
    return await _asked(request, lab, caller, "/chat/completions")


@router.post("/completions")
async def completions(request: Request, lab: LabHere, caller: EvalWriter) -> Response:
    """What follows a text."""
    return await _asked(request, lab, caller, "/completions")


async def _asked(request: Request, lab: LabHere, caller: EvalWriter, path: str) -> Response:
    from mettle.hub.serving.answers import ModelQuestion, passed_on

    body = await read_json(request, max_bytes=MAX_ASKED_BYTES)
    asked = await run_in_threadpool(ModelQuestion.of, lab, caller, body.get("model"))
    if request.app.state.engines is None:
        raise HttpError(503, "this Hub serves no models (--served-models)", code="not_offered")
    return await passed_on(request.app.state.engines, asked, path, body)
