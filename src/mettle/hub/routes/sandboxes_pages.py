"""The page of sandboxes: those that run, what they may use of the host, and ending one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from mettle.hub.access import LabHere, SignedIn
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.pages import page
from mettle.hub.routes.forms import CheckedForm
from mettle.hub.routes.looking import looking
from mettle.web.problems import HttpError

if TYPE_CHECKING:
    from mettle.hub.sandboxes import HubSandboxes

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])


@router.get("/sandboxes")
async def sandboxes_page(request: Request, lab: LabHere, caller: SignedIn) -> HTMLResponse:
    """One's own; an admin sees everybody's. Coroutines, since the service lives on the event loop."""
    if not caller.may("sandboxes:read"):
        raise HttpError(403, "this token does not cover sandboxes:read; make one that does", code="scope_missing")
    return await _sandboxes(request, lab, caller)


@router.post("/sandboxes")
async def change(request: Request, lab: LabHere, caller: SignedIn, fields: CheckedForm) -> Response:
    """End one."""
    from mettle.hub.alive import end_sandbox

    sandboxes, action = _of(request), fields.get("action", "")
    service = None if sandboxes is None else sandboxes.service
    try:
        if action != "end":
            raise HttpError(400, f"there is no action {action[:40]!r}")
        if service is None:
            raise HttpError(404, "no sandbox runs here")
        await end_sandbox(service, caller, fields.get("id", ""))
    except HttpError as error:
        answer = await _sandboxes(request, lab, caller, problem=str(error))
        answer.status_code = error.status
        return answer
    return RedirectResponse("/sandboxes", status_code=303)


def _of(request: Request) -> HubSandboxes | None:
    """None for a Hub that offers none."""
    sandboxes: HubSandboxes | None = request.app.state.sandboxes
    return sandboxes


async def _sandboxes(request: Request, lab: Lab, caller: Caller, *, problem: str = "") -> HTMLResponse:
    sandboxes, board = _of(request), None
    if sandboxes is not None and sandboxes.service is not None:
        from mettle.hub.alive import board_of, owners_named  # the room of sandboxes is slow to import

        owners = {each.owner for each in sandboxes.service.register.alive}
        names = await run_in_threadpool(owners_named, lab, owners)
        board = None if sandboxes.service is None else board_of(sandboxes.service, caller, names)
    return page(
        "sandboxes.html", board=board, is_offered=sandboxes is not None, problem=problem,
        max_machines=None if sandboxes is None else sandboxes.config.quota.max_machines,
    )  # fmt: skip
