"""The page of secrets and variables that all jobs of a person, or of a team, are told."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from mettle.hub.access import LabHere, SignedIn
from mettle.hub.caller import Caller
from mettle.hub.pages import page
from mettle.hub.routes.forms import CheckedForm
from mettle.hub.routes.looking import looking
from mettle.hub.routes.secrets_api import change_secret
from mettle.hub.secrets import store
from mettle.web.problems import HttpError

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])


@router.get("/secrets")
def own_secrets(caller: SignedIn) -> Response:
    """One's own."""
    return RedirectResponse(f"/secrets/{caller.name}", status_code=307)


@router.get("/secrets/{owner}")
def secrets_page(lab: LabHere, caller: SignedIn, owner: str) -> HTMLResponse:
    """Of a person or a team."""
    owner_id = _owner(caller, owner)
    with lab.database.read() as c:
        found = store.list_secrets(c, owner_id, None)
    owners = [caller.name, *(team.slug for team in caller.teams)]
    return page("secrets.html", owner=owner, owners=owners, secrets=found, target=f"/secrets/{owner}")


@router.post("/secrets/{owner}")
def change_secrets(lab: LabHere, caller: SignedIn, owner: str, fields: CheckedForm) -> Response:
    """Set one, or delete one."""
    with lab.database.write() as c:
        change_secret(c, lab, caller, _owner(caller, owner), None, fields)
    return RedirectResponse(f"/secrets/{owner}", status_code=303)


def _owner(caller: Caller, slug: str) -> str:
    """Raises: HttpError 403 for a token without the right, 404 for somebody else's."""
    assert caller.person is not None, "signed in"
    if not caller.may("environments:write"):
        raise HttpError(403, "this token does not cover environments:write; make one that does", code="scope_missing")
    if slug == caller.person.slug:
        return caller.person.id
    team = next((team for team in caller.teams if team.slug == slug), None)
    if team is None:
        raise HttpError(404, f"you are no {slug[:40]!r}, and in no team of that name")
    return team.id
