"""The pages of teams, and those for the Hub's admins: people and the audit log."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from mettle.errors import UserError
from mettle.hub.access import Admin, LabHere, SignedIn
from mettle.hub.accounts import audit, people, sessions, teams
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.pages import page
from mettle.hub.routes.addresses import root_of
from mettle.hub.routes.forms import CheckedForm
from mettle.hub.routes.looking import looking
from mettle.web.problems import HttpError

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])


@router.get("/teams")
def teams_page(caller: SignedIn) -> HTMLResponse:
    """My teams, and the form for another."""
    return page("teams.html", teams=caller.teams, problem="")


@router.post("/teams")
def make_team(lab: LabHere, caller: SignedIn, fields: CheckedForm) -> Response:
    """A new team."""
    assert caller.person is not None, "signed in"
    try:
        with lab.database.write() as c:
            team = teams.create_team(
                c, fields.get("slug", "").strip().lower(), caller.person, name=fields.get("name", "")
            )
            audit.note(c, caller.name, "team.create", team.slug, address=caller.address)
    except UserError as error:
        answer = page("teams.html", teams=caller.teams, problem=str(error))
        answer.status_code = 400
        return answer
    return RedirectResponse(f"/teams/{quote(team.slug)}", status_code=303)


@router.get("/teams/{slug}")
def team_page(lab: LabHere, caller: SignedIn, slug: str) -> HTMLResponse:
    """Who is in a team."""
    return _team(lab, caller, slug)


@router.post("/teams/{slug}/members")
def change_member(lab: LabHere, caller: SignedIn, slug: str, fields: CheckedForm) -> Response:
    """Add somebody, give another role, or let go."""
    team = _team_of(caller, slug)
    username, role = fields.get("username", "").strip().lower(), fields.get("role", "")
    if username != caller.name or role:
        _must_be_admin(team)
    try:
        with lab.database.write() as c:
            person = people.find_person(c, username)
            if person is None:
                raise UserError(f"nobody here is called {username[:60]!r}; invite them by a link")
            if role:
                teams.add_member(c, team.id, person.id, role)
            else:
                teams.remove_member(c, team.id, person.id)
            audit.note(
                c, caller.name, "team.member", f"{slug} {username}", detail=role or "removed", address=caller.address
            )
    except UserError as error:
        return _team(lab, caller, slug, problem=str(error), status=400)
    is_gone = username == caller.name and not role
    return RedirectResponse("/teams" if is_gone else f"/teams/{quote(slug)}", status_code=303)


@router.post("/teams/{slug}/invite")
def invite_to_team(request: Request, lab: LabHere, caller: SignedIn, slug: str, fields: CheckedForm) -> Response:
    """A one-time link that makes an account in the team."""
    team = _team_of(caller, slug)
    _must_be_admin(team)
    with lab.database.write() as c:
        secret = sessions.make_link(c, "invitation", team_id=team.id)
        audit.note(c, caller.name, "team.invite", slug, address=caller.address)
    return _team(lab, caller, slug, link=_link(request, secret))


@router.get("/people")
def people_page(lab: LabHere, caller: Admin) -> HTMLResponse:
    """Everybody with an account."""
    return _people(lab)


@router.post("/people/invite")
def invite(request: Request, lab: LabHere, caller: Admin, fields: CheckedForm) -> HTMLResponse:
    """A one-time link that makes an account."""
    with lab.database.write() as c:
        secret = sessions.make_link(c, "invitation")
        audit.note(c, caller.name, "person.invite", "", address=caller.address)
    return _people(lab, link=_link(request, secret))


@router.post("/people/{person_id}")
def change_person(request: Request, lab: LabHere, caller: Admin, person_id: str, fields: CheckedForm) -> Response:
    """Shut somebody out, let them in again, or make a link that sets their password."""
    action = fields.get("action", "")
    try:
        with lab.database.write() as c:
            person = people.person_by_id(c, person_id)
            if person is None:
                raise HttpError(404, "there is no such person")
            if action not in ("disable", "enable", "password"):
                raise UserError(f"there is no action {action[:40]!r}")
            audit.note(c, caller.name, f"person.{action}", person.slug, address=caller.address)
            if action == "password":
                secret = sessions.make_link(c, "password", person_id=person.id)
            else:
                people.set_disabled(c, person.id, action == "disable")
    except UserError as error:
        return _people(lab, problem=str(error), status=400)
    return (
        _people(lab, link=_link(request, secret))
        if action == "password"
        else RedirectResponse("/people", status_code=303)
    )


@router.get("/audit")
def audit_page(lab: LabHere, caller: Admin, words: Annotated[str, Query(max_length=100)] = "") -> HTMLResponse:
    """Who did what."""
    with lab.database.read() as c:
        entries = audit.newest(c, limit=1000)
    wanted = words.lower().split()
    shown = [e for e in entries if all(word in " ".join(map(str, e)).lower() for word in wanted)]
    return page("audit.html", entries=shown[:300], words=words)


def _team(lab: Lab, caller: Caller, slug: str, *, problem: str = "", link: str = "", status: int = 200) -> HTMLResponse:
    team = _team_of(caller, slug)
    with lab.database.read() as c:
        members = teams.members_of(c, team.id)
    answer = page("team.html", team=team, members=members, problem=problem, link=link, me=caller.name)
    answer.status_code = status
    return answer


def _people(lab: Lab, *, problem: str = "", link: str = "", status: int = 200) -> HTMLResponse:
    with lab.database.read() as c:
        found = people.list_people(c)
    answer = page("people.html", people=found, problem=problem, link=link)
    answer.status_code = status
    return answer


def _team_of(caller: Caller, slug: str) -> teams.Team:
    found = next((team for team in caller.teams if team.slug == slug), None)
    if found is None or not caller.is_session:
        raise HttpError(404, f"you are in no team called {slug[:60]!r}")
    return found


def _must_be_admin(team: teams.Team) -> None:
    if team.role != teams.ADMIN:
        raise HttpError(403, "only admins of a team say who is in it")


def _link(request: Request, secret: str) -> str:
    return f"{root_of(request)}/join/{secret}"
