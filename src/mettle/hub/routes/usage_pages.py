"""The page of usage: tokens of a month by owner, person and run; for admins also quotas and prices."""

from __future__ import annotations

import math
import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import HTMLResponse, RedirectResponse
from sqlalchemy import Connection
from starlette.responses import Response

from mettle.hub.access import Admin, LabHere, SignedIn
from mettle.hub.accounts import audit
from mettle.hub.accounts.people import owner_id_of
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.pages import page
from mettle.hub.routes.forms import CheckedForm
from mettle.hub.routes.looking import looking
from mettle.hub.training import usage
from mettle.hub.training.submission import offered_models
from mettle.web.problems import HttpError

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])
MAX_TOKENS = 1 << 60


@router.get("/usage")
def usage_page(lab: LabHere, caller: SignedIn, month: Annotated[str, Query(max_length=7)] = "") -> HTMLResponse:
    """One's own month and that of one's teams; an admin sees everybody's."""
    if not caller.may("training:read"):
        raise HttpError(403, "this token does not cover training:read; make one that does", code="scope_missing")
    return _usage(lab, caller, month)


@router.post("/usage")
def change(lab: LabHere, caller: Admin, fields: CheckedForm) -> Response:
    """Set a quota or a price, or with an empty figure take it away."""
    action, name, figure = fields.get("action", ""), fields.get("name", "").strip(), fields.get("figure", "")
    try:
        change_it = {"quota": _set_quota, "price": _set_price}.get(action)
        if change_it is None:
            raise HttpError(400, f"there is no action {action[:40]!r}")
        with lab.database.write() as c:
            change_it(c, name, figure)
            audit.note(c, caller.name, f"{action}.set", name, detail=figure or "none", address=caller.address)
    except HttpError as error:
        answer = _usage(lab, caller, "", problem=str(error))
        answer.status_code = error.status
        return answer
    return RedirectResponse("/usage", status_code=303)


def _set_quota(c: Connection, name: str, text: str) -> None:
    owner_id = owner_id_of(c, name)
    if owner_id is None:
        raise HttpError(404, f"there is no person or team called {name[:60]!r}")
    figure = _figure(text, "a quota", MAX_TOKENS)
    if figure is not None and figure != int(figure):
        raise HttpError(422, "a quota is a whole number of tokens")
    usage.set_quota(c, owner_id, None if figure is None else int(figure))


def _set_price(c: Connection, name: str, text: str) -> None:
    if not name or len(name) > 200:
        raise HttpError(422, "say which model the price is of; * is for all that have none of their own")
    usage.set_price(c, name, _figure(text, "a price", 1e9))


def _figure(text: str, what: str, most: float) -> float | None:
    """A figure of a form; thousands may be apart. None for an empty field."""
    plain = text.strip().replace(",", "").replace("_", "").replace(" ", "")
    if not plain:
        return None
    try:
        value = float(plain)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise HttpError(422, f"{what} is a number from 0 on, not {text[:40]!r}; leave it empty for none")
    return value


def _usage(lab: Lab, caller: Caller, month: str, *, problem: str = "") -> HTMLResponse:
    month = month or usage.month_of(time.time())
    with lab.database.read() as c:
        others = usage.owners_with_usage(c, month) if caller.is_admin else []
        ids = [*caller.owner_ids, *(each for each in others if each not in caller.owner_ids)]
        found = [usage.usage_of(c, owner_id, month) for owner_id in ids]
        prices = usage.prices(c)
    models = [each.name for each in offered_models(lab.models)]
    return page("usage.html", owners=found, month=month, prices=prices, models=models, problem=problem)
