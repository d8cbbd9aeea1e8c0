"""The page on which people talk to a model of the Hub. The conversation is kept by the page, not by the Hub."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse

from mettle.hub.access import LabHere, SignedIn
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.pages import page
from mettle.hub.routes.forms import CheckedForm
from mettle.hub.routes.looking import looking
from mettle.hub.serving.models import list_models
from mettle.web.problems import HttpError

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])
MAX_TURNS = 40
MAX_TOKENS = 512


@router.get("/chat")
def chat_page(request: Request, lab: LabHere, caller: SignedIn, model: str = "") -> HTMLResponse:
    """An empty conversation."""
    return _page(request, lab, caller, model=model[:200], messages=[])


@router.post("/chat")
async def say(request: Request, lab: LabHere, caller: SignedIn, fields: CheckedForm) -> HTMLResponse:
    """Another turn of the conversation that the form holds."""
    from mettle.hub.serving.answers import ModelQuestion, said

    model, text = fields.get("model", ""), fields.get("text", "").strip()
    messages = _kept(fields.get("messages", ""))
    shown: dict[str, Any] = {"model": model, "messages": messages, "text": text}
    try:
        if not text:
            raise HttpError(400, "say something first")
        asked = await run_in_threadpool(ModelQuestion.of, lab, caller, model)
        if request.app.state.engines is None:
            raise HttpError(503, "this Hub serves no models (--served-models)")
        turns = [*messages, {"role": "user", "content": text}]
        answer = await said(request.app.state.engines, asked, turns, MAX_TOKENS)
    except HttpError as error:
        made = await run_in_threadpool(_page, request, lab, caller, **shown, problem=str(error))
        made.status_code = error.status
        return made
    turns.append({"role": "assistant", "content": answer})
    return await run_in_threadpool(_page, request, lab, caller, model=model, messages=turns)


def _kept(text: str) -> list[dict[str, str]]:
    """The conversation as the page has kept it; one that cannot be read begins anew."""
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    turns = [
        {"role": str(each["role"]), "content": str(each["content"])} for each in found
        if isinstance(each, dict) and each.get("role") in ("user", "assistant") and "content" in each
    ]  # fmt: skip
    return turns[-MAX_TURNS:]


def _page(
    request: Request, lab: Lab, caller: Caller, *, model: str, messages: list[dict[str, str]], text: str = "",
    problem: str = "",
) -> HTMLResponse:  # fmt: skip
    if not caller.may("evals:write"):
        raise HttpError(403, "this token does not cover evals:write; make one that does", code="scope_missing")
    with lab.database.read() as c:
        models = list_models(c, lab, caller)
    return page(
        "chat.html", models=models, model=model, is_listed=any(each.name == model for each in models), text=text,
        messages=messages, kept=json.dumps(messages), problem=problem, is_served=request.app.state.engines is not None,
    )  # fmt: skip
