"""What every way of signing in has: its form, the cookie, and where it leads."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import HTMLResponse
from starlette.responses import Response

from mettle.hub.access import COOKIE
from mettle.hub.accounts import sessions
from mettle.hub.lab import Lab
from mettle.hub.pages import page
from mettle.hub.routes.addresses import root_of


def sign_in_form(lab: Lab, following: str, *, problem: str = "", slug: str = "", status: int = 200) -> HTMLResponse:
    """The page with all ways in. `following` is a path that `path_here` let through."""
    provider = None if lab.provider is None else lab.provider.config.label
    answer = page("signin.html", next=following, problem=problem, slug=slug, provider=provider)
    answer.status_code = status
    return answer


def with_cookie(request: Request, answer: Response, secret: str) -> Response:
    """The answer that signs a browser in."""
    set_cookie(request, answer, COOKIE, secret, max_age_s=sessions.SESSION_S)
    return answer


def set_cookie(
    request: Request, answer: Response, name: str, secret: str, *, max_age_s: float, path: str = "/"
) -> None:
    """A cookie that no script reads, and that goes over TLS alone where the page came so."""
    answer.set_cookie(
        name, secret, max_age=int(max_age_s), path=path, httponly=True, samesite="lax",
        secure=root_of(request).startswith("https:"),
    )  # fmt: skip


def path_here(target: str) -> str:
    """Where to go after signing in: a path of this server, or the first page."""
    is_ours = target.startswith("/") and not target.startswith("//") and "\\" not in target
    if not is_ours or any(ord(letter) < 33 for letter in target):
        return "/"
    return target
