"""Forms of pages: read within limits, and only with the CSRF word of the session that the page was made for."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, Request

from mettle.hub.access import SignedIn
from mettle.hub.caller import Caller
from mettle.web.bodies import read_body
from mettle.web.doors import is_same_secret
from mettle.web.problems import HttpError

MAX_FORM_BYTES = 64 << 10


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; of several with one name, all, separated by spaces."""
    body = await read_body(request, max_bytes=MAX_FORM_BYTES)
    fields: dict[str, str] = {}
    try:
        for name, value in parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=200):
            fields[name] = f"{fields[name]} {value}" if name in fields else value
    except ValueError as error:
        raise HttpError(400, f"this form cannot be read: {error}") from None
    return fields


Fields = Annotated[dict[str, str], Depends(form_of)]


def checked_form(request: Request, caller: SignedIn, fields: Fields) -> dict[str, str]:
    """The fields of a form of somebody who is signed in. Raises: HttpError 403 without the session's word."""
    _must_have_the_word(caller, fields)
    return fields


def _must_have_the_word(caller: Caller, fields: dict[str, str]) -> None:
    if not caller.is_session or not is_same_secret(fields.get("csrf", ""), caller.csrf):
        raise HttpError(
            403, "this form is of another session, or of none; go back, load the page again, and send it again"
        )


CheckedForm = Annotated[dict[str, str], Depends(checked_form)]
