"""Who asks, and what they may do.

A request comes with a token (`Authorization: Bearer`), with the cookie of a session, or with neither. Parts:
`caller_of`; the dependencies `SignedIn`, `Anybody`, `Admin`, `scoped`. Invariants: a token does what its scopes say and
never more than its person; a write that a session's cookie carries needs the session's CSRF word, too; somebody who may
not know of a thing hears that it is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import Depends, Request

from mettle.hub.accounts.people import person_by_id
from mettle.hub.accounts.sessions import find_session
from mettle.hub.accounts.teams import teams_of
from mettle.hub.accounts.tokens import SCOPES, holder_of, touch
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.web.doors import bearer, is_same_secret
from mettle.web.problems import HttpError

COOKIE: Final = "mettle_session"
CSRF_HEADER: Final = "x-csrf-token"
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def lab_of(request: Request) -> Lab:
    """The lab of this server."""
    lab: Lab = request.app.state.lab
    return lab


LabHere = Annotated[Lab, Depends(lab_of)]


def caller_of(request: Request, lab: LabHere) -> Caller:
    """Who asks. Raises: HttpError 401 for a token that opens nothing, 403 for a write without its CSRF word."""
    address = request.client.host if request.client else ""
    secret = bearer(request.headers) or _basic_password(request)
    if secret:
        return token_caller(lab, secret, address)
    cookie = request.cookies.get(COOKIE, "")
    if not cookie:
        return Caller(address=address)
    with lab.database.read() as c:
        session = find_session(c, cookie)
        person = None if session is None else person_by_id(c, session.person_id)
        if session is None or person is None or person.is_disabled:
            return Caller(address=address)
        teams = tuple(teams_of(c, person.id))
    given = request.headers.get(CSRF_HEADER, "")
    # A page's form carries the word in its body, where `routes.forms` looks at it.
    is_form = not request.url.path.startswith("/api/")
    if request.method not in _SAFE and not is_form and not is_same_secret(given, session.csrf):
        raise HttpError(403, f"a write with a session's cookie needs its {CSRF_HEADER} header", code="csrf")
    return Caller(
        person, teams, frozenset(SCOPES), session.csrf, True, address, roles={team.id: team.role for team in teams}
    )


def token_caller(lab: Lab, secret: str, address: str) -> Caller:
    """Whose token a secret is. Raises: HttpError 401 where it opens nothing."""
    with lab.database.read() as c:
        found = holder_of(c, secret)
        person = None if found is None else person_by_id(c, found[0])
        teams = () if person is None else tuple(teams_of(c, person.id))
    if found is None or person is None or person.is_disabled:
        message = "this token opens nothing: it was revoked, has run out, or never was; `mettle login` gets another"
        raise HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    if found[3]:
        with lab.database.write() as c:
            touch(c, found[1])
    roles = {team.id: team.role for team in teams}
    return Caller(person, teams, frozenset(found[2]), "", False, address, found[1], roles)


def _basic_password(request: Request) -> str:
    """pip sends a token as the password of Basic authentication."""
    import base64
    import binascii

    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        user, _, password = base64.b64decode(encoded, validate=True).decode("utf-8").partition(":")
    except (binascii.Error, ValueError):
        return "unreadable"
    return password or user


Anybody = Annotated[Caller, Depends(caller_of)]


def signed_in(caller: Anybody) -> Caller:
    """Raises: HttpError 401 for nobody."""
    if caller.person is None:
        message = "sign in first: `mettle login`, or a token as `Authorization: Bearer ...`"
        raise HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return caller


SignedIn = Annotated[Caller, Depends(signed_in)]


def scoped(scope: str) -> Any:
    """A caller who is signed in, and whose token covers a scope."""

    def check(caller: SignedIn) -> Caller:
        _must(caller, scope)
        return caller

    return Annotated[Caller, Depends(check)]


def readable(scope: str) -> Callable[[Caller], Caller]:
    """Anybody, but a token only with its scope: what is public needs no token, and a token does what it says alone."""

    def check(caller: Anybody) -> Caller:
        if caller.person is not None:
            _must(caller, scope)
        return caller

    return check


def _must(caller: Caller, scope: str) -> None:
    if not caller.may(scope):
        raise HttpError(
            403, f"this token does not cover {scope}; make one that does", code="scope_missing", param=scope
        )


AccountReader = scoped("account:read")
AccountWriter = scoped("account:write")
EnvironmentWriter = scoped("environments:write")
EvalWriter = scoped("evals:write")
TrainingReader = scoped("training:read")
TrainingWriter = scoped("training:write")
EvalReader = Annotated[Caller, Depends(readable("evals:read"))]
EnvironmentReader = Annotated[Caller, Depends(readable("environments:read"))]


def admin(caller: SignedIn) -> Caller:
    """Raises: HttpError 403 for who is no admin, or asks with a token: the Hub is governed from its pages."""
    if not caller.is_admin or not caller.is_session:
        raise HttpError(403, "this is for admins of the Hub, signed in on its pages")
    return caller


Admin = Annotated[Caller, Depends(admin)]
