"""Who am I, my teams, my tokens, and how a terminal signs in. Paths and fields are those of the field's clients."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from pydantic import Field

from mettle.errors import UserError
from mettle.hub.access import AccountReader, AccountWriter, LabHere, SignedIn
from mettle.hub.accounts import audit, people, sessions, teams, tokens
from mettle.hub.caller import Caller
from mettle.hub.routes.addresses import iso
from mettle.hub.routes.json_bodies import HubRequest, body_of
from mettle.web.doors import bearer
from mettle.web.problems import HttpError

router = APIRouter(prefix="/api/v1", tags=["accounts"])

TERMINAL_DAYS: Final = 365.0


class ChallengeAsked(HubRequest):
    """`encryptionPublicKey`, in PEM, seals the token for the terminal; without it the token comes as it is."""

    encryptionPublicKey: str = ""


class SlugAsked(HubRequest):
    slug: str


class TeamAsked(HubRequest):
    slug: str
    name: str = ""


class MemberAsked(HubRequest):
    user: str
    role: str = teams.MEMBER


class TokenAsked(HubRequest):
    name: str
    scopes: list[str]
    days: float | None = Field(default=None, gt=0)


@router.post("/auth_challenge/generate")
def begin_sign_in(
    request: Request, lab: LabHere, asked: Annotated[ChallengeAsked, body_of(ChallengeAsked)]
) -> dict[str, str]:
    """Begin the sign-in of a terminal."""
    lab.limits.challenges.take(request.client.host if request.client else "", "sign-ins from this address")
    if asked.encryptionPublicKey:
        _sealed("", asked.encryptionPublicKey)  # refuses now what could not be sealed later
    with lab.database.write() as c:
        code, secret = sessions.open_challenge(c, asked.encryptionPublicKey)
    return {"challenge": code, "status_auth_token": secret}


@router.get("/auth_challenge/status")
def sign_in_status(request: Request, lab: LabHere, challenge: str) -> dict[str, str | None]:
    """The token once somebody has approved, and then never again; null while it waits; 404 when it is over."""
    with lab.database.write() as c:
        try:
            taken = sessions.take_challenge(c, challenge, bearer(request.headers))
        except UserError as error:
            raise HttpError(404, str(error)) from None
        if taken is None:
            return {"result": None}
        person = people.person_by_id(c, taken[0])
        if person is None or person.is_disabled:
            raise HttpError(404, "this sign-in is over or too old; begin again with `mettle login`")
        agent = request.headers.get("user-agent", "").partition("/")[0] or "terminal"
        _, secret = tokens.create_token(c, person.id, f"sign-in of {agent[:60]}", tokens.SCOPES, days=TERMINAL_DAYS)
        audit.note(c, person.slug, "token.create", f"sign-in of {agent[:60]}", address=_address(request))
    return {"result": _sealed(secret, taken[1]) if taken[1] else secret}


@router.get("/user/whoami")
def whoami(caller: SignedIn) -> dict[str, Any]:
    """Who the token belongs to, and what it covers."""
    return {"data": _whoami(caller)}


@router.patch("/user/slug")
def rename(lab: LabHere, caller: AccountWriter, asked: Annotated[SlugAsked, body_of(SlugAsked)]) -> dict[str, Any]:
    """Another name for me."""
    person = _person(caller)
    with lab.database.write() as c:
        try:
            people.set_slug(c, person.id, asked.slug)
        except UserError as error:
            raise HttpError(409 if "already taken" in str(error) else 422, str(error)) from None
        audit.note(c, person.slug, "person.rename", asked.slug, address=caller.address)
    return {"data": {"id": person.id, "slug": asked.slug, "name": person.name, "email": person.email}}


@router.get("/user/teams")
def my_teams(
    caller: AccountReader, offset: Annotated[int, Query(ge=0)] = 0, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> dict[str, Any]:
    """The teams that I am in."""
    shown = caller.teams[offset : offset + limit]
    rows = [
        {"teamId": t.id, "name": t.name, "slug": t.slug, "role": t.role, "createdAt": iso(t.joined_at)} for t in shown
    ]
    return {"data": rows, "total_count": len(caller.teams)}


@router.post("/teams", status_code=201)
def make_team(lab: LabHere, caller: AccountWriter, asked: Annotated[TeamAsked, body_of(TeamAsked)]) -> dict[str, Any]:
    """A new team, of which I am the first admin."""
    with lab.database.write() as c:
        team = teams.create_team(c, asked.slug, _person(caller), name=asked.name)
        audit.note(c, caller.name, "team.create", team.slug, address=caller.address)
    return {"data": {"teamId": team.id, "name": team.name, "slug": team.slug, "role": team.role}}


@router.get("/teams/{team_id}/members")
def list_members(lab: LabHere, caller: AccountReader, team_id: str) -> dict[str, Any]:
    """Who is in a team of mine."""
    _must_be_in(caller, team_id)
    with lab.database.read() as c:
        found = teams.members_of(c, team_id)
    rows = [
        {"userId": m.id, "userName": m.slug, "userEmail": m.email, "role": m.role, "joinedAt": iso(m.joined_at)}
        for m in found
    ]
    return {"data": rows}


@router.post("/teams/{team_id}/members", status_code=201)
def add_member(
    lab: LabHere, caller: AccountWriter, team_id: str, asked: Annotated[MemberAsked, body_of(MemberAsked)]
) -> dict[str, Any]:
    """Add somebody who has an account, or change a role."""
    _must_govern(caller, team_id)
    with lab.database.write() as c:
        person = people.find_person(c, asked.user)
        if person is None:
            raise HttpError(404, f"nobody here is called {asked.user[:60]!r}")
        teams.add_member(c, team_id, person.id, asked.role)
        audit.note(c, caller.name, "team.member", f"{team_id} {person.slug}", detail=asked.role, address=caller.address)
    return {"success": True}


@router.delete("/teams/{team_id}/members/{person_id}")
def drop_member(lab: LabHere, caller: AccountWriter, team_id: str, person_id: str) -> dict[str, Any]:
    """Let somebody go; oneself, too."""
    _must_be_in(caller, team_id)
    if person_id != _person(caller).id:
        _must_govern(caller, team_id)
    with lab.database.write() as c:
        teams.remove_member(c, team_id, person_id)
        audit.note(c, caller.name, "team.remove", f"{team_id} {person_id}", address=caller.address)
    return {"success": True}


@router.get("/tokens")
def list_tokens(lab: LabHere, caller: AccountReader) -> dict[str, Any]:
    """My tokens, without what opens anything."""
    with lab.database.read() as c:
        found = tokens.tokens_of(c, _person(caller).id)
    return {"data": [_token(token) for token in found]}


@router.post("/tokens", status_code=201)
def make_token(
    lab: LabHere, caller: AccountWriter, asked: Annotated[TokenAsked, body_of(TokenAsked)]
) -> dict[str, Any]:
    """A new token. Its secret is in this answer and nowhere else; it covers no more than what asks for it."""
    for scope in tokens.checked_scopes(asked.scopes):
        if not caller.may(scope):
            raise HttpError(403, f"a token without {scope} makes none that has it", code="scope_missing", param=scope)
    with lab.database.write() as c:
        token, secret = tokens.create_token(c, _person(caller).id, asked.name, asked.scopes, days=asked.days)
        audit.note(c, caller.name, "token.create", token.name, detail=" ".join(token.scopes), address=caller.address)
    return {"data": {**_token(token), "token": secret}}


@router.delete("/tokens/{token_id}")
def revoke_token(lab: LabHere, caller: AccountWriter, token_id: str) -> dict[str, Any]:
    """Close a token for good."""
    with lab.database.write() as c:
        try:
            name = tokens.revoke(c, _person(caller).id, token_id)
        except UserError as error:
            raise HttpError(404, str(error)) from None
        audit.note(c, caller.name, "token.revoke", name, address=caller.address)
    return {"success": True}


def _whoami(caller: Caller) -> dict[str, Any]:
    person = _person(caller)
    areas = {area: {"read": caller.may(f"{area}:read"), "write": caller.may(f"{area}:write")} for area in tokens.AREAS}
    return {
        "id": person.id, "email": person.email or None, "name": person.name, "slug": person.slug, "scope": areas,
        "is_admin": person.is_admin,
    }  # fmt: skip


def _token(token: tokens.Token) -> dict[str, Any]:
    return {
        "id": token.id, "name": token.name, "scopes": list(token.scopes), "createdAt": iso(token.created_at),
        "expiresAt": iso(token.expires_at), "lastUsedAt": iso(token.used_at),
    }  # fmt: skip


def _person(caller: Caller) -> people.Person:
    assert caller.person is not None, "the route is for people who are signed in"
    return caller.person


def _must_be_in(caller: Caller, team_id: str) -> None:
    if not caller.is_member(team_id) or team_id == _person(caller).id:
        raise HttpError(404, f"you are in no team {team_id[:80]!r}")


def _must_govern(caller: Caller, team_id: str) -> None:
    _must_be_in(caller, team_id)
    if caller.roles.get(team_id) != teams.ADMIN:
        raise HttpError(403, "only admins of a team say who is in it")


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _sealed(secret: str, public_key: str) -> str:
    """The secret as only the holder of the key can read it (RSA-OAEP with SHA-256). Raises: HttpError 422."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(public_key.encode("ascii"))
    except ValueError:
        key = None
    if not isinstance(key, RSAPublicKey) or key.key_size < 2048:
        raise HttpError(422, "encryptionPublicKey must be an RSA key of 2,048 bits or more, in PEM") from None
    scheme = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), None)
    return base64.b64encode(key.encrypt(secret.encode(), scheme)).decode()
