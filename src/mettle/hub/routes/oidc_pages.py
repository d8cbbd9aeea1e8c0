"""Signing in through a provider of identities: there, back, and what of it opens one's own account.

A browser is sent to the provider by a link, never by a form: the pages' content security policy lets forms lead to this
server alone.
"""

from __future__ import annotations

import logging
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from mettle.errors import ServiceError, UserError
from mettle.hub.access import Anybody, LabHere, SignedIn
from mettle.hub.accounts import audit, sessions
from mettle.hub.accounts.identifiers import new_secret
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.oidc.identity import ProviderIdentity
from mettle.hub.oidc.pending import PENDING_S, PendingSignIn, begin_sign_in, take_sign_in
from mettle.hub.oidc.people import link, person_of, unlink
from mettle.hub.oidc.provider import OidcProvider
from mettle.hub.pages import page
from mettle.hub.routes.addresses import root_of
from mettle.hub.routes.forms import CheckedForm
from mettle.hub.routes.looking import looking
from mettle.hub.routes.signing_in import path_here, set_cookie, sign_in_form, with_cookie
from mettle.web.problems import HttpError

logger = logging.getLogger(__name__)
router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])

PATH: Final = "/signin/oidc"
BACK: Final = f"{PATH}/back"
BROWSER: Final = "mettle_signin"
"""Cookie of a browser that is on its way to the provider."""
Word = Annotated[str | None, Query(max_length=4000)]


def provider_of(lab: LabHere) -> OidcProvider:
    """Raises: HttpError 404 where there is none."""
    if lab.provider is None:
        raise HttpError(404, "people sign in here by password alone; `[oidc]` names a provider (mettle hub serve)")
    return lab.provider


ProviderHere = Annotated[OidcProvider, Depends(provider_of)]


@router.get(PATH)
def go_to_provider(
    request: Request, lab: LabHere, provider: ProviderHere, caller: Anybody, next: str = "/"
) -> Response:
    """Send the browser to the provider."""
    following = path_here(next)
    if caller.is_session:
        return RedirectResponse(following, status_code=303)
    lab.limits.sign_in_by_address.take(caller.address, "sign-ins from this address")
    try:
        url, browser = _begun(request, lab, provider, following=following)
    except ServiceError as error:
        logger.warning("the provider of identities does not answer", extra={"error": str(error)})
        return sign_in_form(lab, following, problem=str(error), status=503)
    answer = RedirectResponse(url, status_code=303)
    set_cookie(request, answer, BROWSER, browser, max_age_s=PENDING_S, path=PATH)
    return answer


@router.get(BACK)
def come_back(
    request: Request,
    lab: LabHere,
    provider: ProviderHere,
    caller: Anybody,
    code: Word = None,
    state: Word = None,
    iss: Word = None,
    error: Word = None,
) -> Response:
    """What the provider sends the browser back to: a session for whoever signed in there, or one line why not."""
    lab.limits.sign_in_by_address.take(caller.address, "sign-ins from this address")
    following = "/"
    try:
        pending = _taken(request, lab, state)
        following = pending.following
        provider.check_sender(iss)
        if not code or error:
            raise UserError(f"the provider signed nobody in ({(error or 'it sent no code')[:100]}); begin again")
        identity = provider.identity(
            code, redirect_url=_redirect_url(request, provider), nonce=pending.nonce, verifier=pending.verifier
        )
        if pending.person_id is not None:
            return _added(lab, caller, pending.person_id, identity)
        secret = _signed_in(lab, provider, identity, caller.address)
    except (UserError, ServiceError) as refusal:
        return _refused(lab, caller, following, refusal)
    return with_cookie(request, RedirectResponse(following, status_code=303), secret)


@router.post("/account/identities")
def add_identity(
    request: Request, lab: LabHere, provider: ProviderHere, caller: SignedIn, fields: CheckedForm
) -> Response:
    """Begin to add a provider's identity to my account; the page that comes back leads there."""
    assert caller.person is not None, "signed in"
    lab.limits.sign_in_by_address.take(caller.address, "sign-ins from this address")
    url, browser = _begun(request, lab, provider, following="/account", person_id=caller.person.id)
    answer = page("identity.html", provider=provider.config.label, url=url)
    set_cookie(request, answer, BROWSER, browser, max_age_s=PENDING_S, path=PATH)
    return answer


@router.post("/account/identities/remove")
def remove_identity(lab: LabHere, caller: SignedIn, fields: CheckedForm) -> Response:
    """Take an identity away from my account."""
    assert caller.person is not None, "signed in"
    issuer, subject = fields.get("issuer", ""), fields.get("subject", "")
    with lab.database.write() as c:
        unlink(c, caller.person.id, issuer, subject)
        audit.note(c, caller.name, "identity.remove", caller.name, detail=issuer, address=caller.address)
    return RedirectResponse("/account", status_code=303)


def _begun(
    request: Request, lab: Lab, provider: OidcProvider, *, following: str, person_id: str | None = None
) -> tuple[str, str]:
    """The address at the provider, and the secret of the browser that goes there."""
    browser = request.cookies.get(BROWSER) or new_secret()
    with lab.database.write() as c:
        state, made = begin_sign_in(c, browser, following=following, person_id=person_id)
    redirect_url = _redirect_url(request, provider)
    return provider.sign_in_url(redirect_url, state=state, nonce=made.nonce, verifier=made.verifier), browser


def _taken(request: Request, lab: Lab, state: str | None) -> PendingSignIn:
    with lab.database.write() as c:
        return take_sign_in(c, request.cookies.get(BROWSER, ""), state or "")


def _signed_in(lab: Lab, provider: OidcProvider, identity: ProviderIdentity, address: str) -> str:
    with lab.database.write() as c:
        person = person_of(c, provider.config, identity, address=address)
        audit.note(c, person.slug, "session.open", person.slug, detail=identity.issuer, address=address)
        return sessions.open_session(c, person.id)


def _added(lab: Lab, caller: Caller, person_id: str, identity: ProviderIdentity) -> Response:
    """The account is that of the session that began it: whoever signed in meanwhile is somebody else."""
    if not caller.is_session or caller.person is None or caller.person.id != person_id:
        raise UserError("you have signed out or in as somebody else meanwhile; begin again on your account's page")
    with lab.database.write() as c:
        link(c, identity, person_id)
        said = f"{identity.issuer} {identity.email}".strip()
        audit.note(c, caller.name, "identity.link", caller.name, detail=said, address=caller.address)
    return RedirectResponse("/account", status_code=303)


def _refused(lab: Lab, caller: Caller, following: str, error: Exception) -> Response:
    with lab.database.write() as c:
        audit.note(c, caller.name, "session.refused", "oidc", detail=str(error), address=caller.address)
    return sign_in_form(lab, following, problem=str(error), status=503 if isinstance(error, ServiceError) else 403)


def _redirect_url(request: Request, provider: OidcProvider) -> str:
    return provider.config.redirect_url or root_of(request) + BACK
