"""Dependencies of pages: who looks at them, and whether they may."""

from __future__ import annotations

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from mettle.hub.access import Anybody, caller_of, lab_of
from mettle.hub.api import PUSHED_ID
from mettle.hub.caller import Caller
from mettle.hub.viewer import Viewer, viewer
from mettle.web.problems import HttpError


async def looking(request: Request, caller: Anybody) -> None:
    """Remember who looks, for the bar of the page. A coroutine, so that what it sets is seen where the page is made."""
    viewer.set(_viewer(request, caller))


async def looking_at_runs(request: Request) -> None:
    """The same for what shows this machine's runs. Raises: HttpError 401 where those are for people with an account."""
    lab = lab_of(request)
    caller = await run_in_threadpool(caller_of, request, lab)
    viewer.set(_viewer(request, caller))
    if PUSHED_ID.fullmatch(str(request.path_params.get("name", ""))):
        return  # who may see what was pushed is looked at where it is opened
    if caller.person is None and not lab.are_runs_open:
        raise HttpError(401, "sign in to see the runs of this machine", code="invalid_api_key")
    if caller.person is not None and not caller.may("training:read"):
        raise HttpError(403, "this token does not cover training:read; make one that does", code="scope_missing")


def _viewer(request: Request, caller: Caller) -> Viewer:
    here = request.url.path
    if caller.person is None:
        return Viewer(here=here)
    return Viewer(caller.person.slug, caller.is_admin, caller.csrf, here)
