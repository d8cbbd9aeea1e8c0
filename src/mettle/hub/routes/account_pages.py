"""The pages of one's own account: signing in and out, joining by a link, tokens, password, a terminal's sign-in."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from mettle.errors import UserError
from mettle.hub.access import COOKIE, Anybody, LabHere, SignedIn, signed_in
from mettle.hub.accounts import audit, people, sessions, teams, tokens
from mettle.hub.accounts.passwords import MIN_LENGTH
from mettle.hub.lab import Lab
from mettle.hub.oidc.people import has_password, identities_of
from mettle.hub.pages import page
from mettle.hub.routes.forms import CheckedForm, Fields
from mettle.hub.routes.looking import looking
from mettle.hub.routes.signing_in import path_here, sign_in_form, with_cookie

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])


@router.get("/signin")
def sign_in_page(lab: LabHere, caller: Anybody, next: str = "/") -> Response:
    """The form."""
    if caller.is_session:
        return RedirectResponse(path_here(next), status_code=303)
    return sign_in_form(lab, path_here(next))


@router.post("/signin")
def sign_in(request: Request, lab: LabHere, fields: Fields) -> Response:
    """Open a session."""
    slug, address = fields.get("username", "").strip().lower(), request.client.host if request.client else ""
    lab.limits.sign_in_by_address.take(address, "sign-ins from this address")
    lab.limits.sign_in_by_name.take(slug, "sign-ins with this name")
    with lab.database.read() as c:
        stored = people.password_of(c, slug)
    following = path_here(fields.get("next", "/"))
    if not lab.passwords.is_right(stored, fields.get("password", "")):
        with lab.database.write() as c:
            audit.note(c, slug, "session.refused", slug, address=address)
        return sign_in_form(lab, following, problem="The name or the password is wrong.", slug=slug, status=401)
    with lab.database.write() as c:
        person = people.find_person(c, slug)
        assert person is not None, "it has a password"
        secret = sessions.open_session(c, person.id)
        audit.note(c, slug, "session.open", slug, address=address)
    return with_cookie(request, RedirectResponse(following, status_code=303), secret)


@router.post("/signout")
def sign_out(request: Request, lab: LabHere, fields: CheckedForm) -> Response:
    """Close the session."""
    with lab.database.write() as c:
        sessions.close_session(c, request.cookies.get(COOKIE, ""))
    answer = RedirectResponse("/", status_code=303)
    answer.delete_cookie(COOKIE, path="/")
    return answer


@router.get("/join/{secret}")
def join_page(lab: LabHere, secret: str) -> HTMLResponse:
    """What a one-time link leads to."""
    with lab.database.read() as c:
        link = sessions.find_link(c, secret)
        known = None if link.person_id is None else people.person_by_id(c, link.person_id)
    return page("join.html", link=link, known=known, problem="", fields={}, min_length=MIN_LENGTH)


@router.post("/join/{secret}")
def join(request: Request, lab: LabHere, secret: str, fields: Fields) -> Response:
    """Make the account, or set the password, that the link is for; the link is used up with it."""
    address = request.client.host if request.client else ""
    lab.limits.sign_in_by_address.take(address, "sign-ins from this address")
    with lab.database.read() as c:
        link = sessions.find_link(c, secret)
        known = None if link.person_id is None else people.person_by_id(c, link.person_id)
    try:
        cookie = _joined(lab, link, known, fields, address)
    except UserError as error:
        shown = {name: fields.get(name, "") for name in ("username", "name", "email")}
        answer = page("join.html", link=link, known=known, problem=str(error), fields=shown, min_length=MIN_LENGTH)
        answer.status_code = 400
        return answer
    return with_cookie(request, RedirectResponse("/account", status_code=303), cookie)


def _joined(lab: Lab, link: sessions.Link, known: people.Person | None, fields: dict[str, str], address: str) -> str:
    if fields.get("password", "") != fields.get("again", ""):
        raise UserError("the two passwords are not the same; type them again")
    stored = lab.passwords.hash(fields.get("password", ""))
    with lab.database.write() as c:
        sessions.use_link(c, link)
        if known is not None:
            people.set_password(c, known.id, stored)
            person = known
        else:
            slug, words = fields.get("username", "").strip().lower(), (fields.get("name", ""), fields.get("email", ""))
            person = people.create_person(c, slug, stored, name=words[0], email=words[1], is_admin=link.kind == "admin")
        if link.team_id is not None:
            teams.add_member(c, link.team_id, person.id, teams.MEMBER)
        audit.note(c, person.slug, f"join.{link.kind}", person.slug, address=address)
        return sessions.open_session(c, person.id)


@router.get("/account")
def account_page(lab: LabHere, caller: SignedIn) -> HTMLResponse:
    """Who I am, my tokens, my password."""
    return _account(lab, caller)


@router.post("/account/tokens")
def make_token(lab: LabHere, caller: SignedIn, fields: CheckedForm) -> HTMLResponse:
    """A new token, shown on this page and never again."""
    assert caller.person is not None, "signed in"
    days = fields.get("days", "").strip()
    try:
        with lab.database.write() as c:
            token, secret = tokens.create_token(
                c, caller.person.id, fields.get("name", ""), fields.get("scopes", "").split(),
                days=float(days) if days else None,
            )  # fmt: skip
            audit.note(
                c, caller.name, "token.create", token.name, detail=" ".join(token.scopes), address=caller.address
            )
    except (UserError, ValueError) as error:
        return _account(lab, caller, problem=str(error), status=400)
    return _account(lab, caller, secret=secret)


@router.post("/account/tokens/{token_id}/revoke")
def revoke_token(lab: LabHere, caller: SignedIn, fields: CheckedForm, token_id: str) -> Response:
    """Close a token."""
    assert caller.person is not None, "signed in"
    with lab.database.write() as c:
        name = tokens.revoke(c, caller.person.id, token_id)
        audit.note(c, caller.name, "token.revoke", name, address=caller.address)
    return RedirectResponse("/account", status_code=303)


@router.post("/account/password")
def change_password(request: Request, lab: LabHere, caller: SignedIn, fields: CheckedForm) -> Response:
    """Another password; every other session ends."""
    assert caller.person is not None, "signed in"
    lab.limits.sign_in_by_name.take(caller.name, "sign-ins with this name")
    with lab.database.read() as c:
        stored = people.password_of(c, caller.name)
    try:
        if not lab.passwords.is_right(stored, fields.get("password", "")):
            raise UserError("the present password is wrong")
        hashed = lab.passwords.hash(fields.get("new", ""))
    except UserError as error:
        return _account(lab, caller, problem=str(error), status=400)
    with lab.database.write() as c:
        people.set_password(c, caller.person.id, hashed)
        secret = sessions.open_session(c, caller.person.id)
        audit.note(c, caller.name, "person.password", caller.name, address=caller.address)
    return with_cookie(request, RedirectResponse("/account", status_code=303), secret)


@router.get("/dashboard/tokens/challenge")
def challenge_page(lab: LabHere, caller: Anybody, code: Annotated[str, Query(max_length=16)] = "") -> Response:
    """Where a terminal sends its person."""
    if caller.person is None:
        target = quote(f"/dashboard/tokens/challenge?code={quote(code)}", safe="")
        return RedirectResponse(f"/signin?next={target}", status_code=303)
    with lab.database.read() as c:
        is_open = sessions.is_challenge_open(c, code)
    return page("challenge.html", code=code, is_open=is_open, is_done=False)


@router.post("/dashboard/tokens/challenge")
def approve(lab: LabHere, caller: SignedIn, fields: CheckedForm) -> HTMLResponse:
    """Let the terminal in."""
    assert caller.person is not None, "signed in"
    code = fields.get("code", "")
    with lab.database.write() as c:
        sessions.approve_challenge(c, code, caller.person.id)
        audit.note(c, caller.name, "challenge.approve", code, address=caller.address)
    return page("challenge.html", code=code, is_open=True, is_done=True)


def _account(lab: Lab, caller: Any, *, secret: str = "", problem: str = "", status: int = 200) -> HTMLResponse:
    person = signed_in(caller).person
    with lab.database.read() as c:
        mine = tokens.tokens_of(c, person.id) if person else []
        identities = identities_of(c, person.id) if person else []
        is_by_password = has_password(c, person.id) if person else False
    answer = page(
        "account.html", person=person, teams=caller.teams, tokens=mine, scopes=tokens.SCOPES, secret=secret,
        problem=problem, min_length=MIN_LENGTH, identities=identities, has_password=is_by_password,
        provider=None if lab.provider is None else lab.provider.config.label,
    )  # fmt: skip
    answer.status_code = status
    return answer
