"""The page of machines: what each has and does; for admins also invitations, and letting one go."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from mettle.hub.access import Admin, LabHere, SignedIn
from mettle.hub.accounts import audit
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.machines import fleet, lending, shown
from mettle.hub.pages import page
from mettle.hub.routes.forms import CheckedForm
from mettle.hub.routes.looking import looking
from mettle.web.problems import HttpError

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])


@router.get("/machines")
def machines_page(lab: LabHere, caller: SignedIn) -> HTMLResponse:
    """All of them; people see the names of their own work only."""
    if not caller.may("training:read"):
        raise HttpError(403, "this token does not cover training:read; make one that does", code="scope_missing")
    return _machines(lab, caller)


@router.post("/machines")
def change(lab: LabHere, caller: Admin, fields: CheckedForm) -> Response:
    """Invite one, revoke an invitation, ask one to leave, let it work again, or remove it."""
    action, known = fields.get("action", ""), fields.get("id", "")
    try:
        if action == "invite":
            with lab.database.write() as c:
                made, token = fleet.invite(c, caller.name, fields.get("name", ""))
                audit.note(c, caller.name, "machine.invite", made.name, address=caller.address)
            return _machines(lab, caller, invited=(made.name, token))
        _change(lab, caller, action, known)
    except HttpError as error:
        answer = _machines(lab, caller, problem=str(error))
        answer.status_code = error.status
        return answer
    return RedirectResponse("/machines", status_code=303)


def _change(lab: Lab, caller: Caller, action: str, known: str) -> None:
    """Raises: HttpError 404 for what is not there, 400 for no action."""
    if action == "leave":
        with lab.database.read() as c:
            machine = fleet.machine_by_id(c, known)
        lending.leave(lab, machine, is_over=False, actor=caller.name, address=caller.address)
        return
    with lab.database.write() as c:
        if action == "revoke":
            name = fleet.revoke_invitation(c, known)
        elif action in ("stay", "remove"):
            machine = fleet.machine_by_id(c, known)
            name = machine.name
            if action == "remove":
                lending.remove(c, machine)
            else:
                fleet.set_state(c, known, fleet.ACTIVE)
        else:
            raise HttpError(400, f"there is no action {action[:40]!r}")
        audit.note(c, caller.name, f"machine.{action}", name, address=caller.address)


def _machines(lab: Lab, caller: Caller, *, invited: tuple[str, str] | None = None, problem: str = "") -> HTMLResponse:
    with lab.database.read() as c:
        invitations = fleet.list_invitations(c) if caller.is_admin else []
    found = shown.fleet_for(lab, caller)
    return page("machines.html", machines=found, invitations=invitations, invited=invited, problem=problem)
