"""The pages of the evals hub: the list, an environment's leaderboard, evaluations beside each other."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from mettle.evals.export.ranking import WRITERS
from mettle.evals.ranking import MAX_EVALUATIONS
from mettle.hub.access import Anybody, LabHere, SignedIn, caller_of, lab_of
from mettle.hub.accounts import audit
from mettle.hub.api import catalog_of
from mettle.hub.evaluations import OpenEvaluation, card_of
from mettle.hub.pages import page, query_of
from mettle.hub.results import pushed
from mettle.hub.results.board import MAX_SHOWN, pushed_board
from mettle.hub.results.leaderboard import leaderboard, rank_local
from mettle.hub.routes import addresses  # noqa: F401 - the kind of path that ids of results are
from mettle.hub.routes.chosen import may_see_local, rank_chosen
from mettle.hub.routes.forms import CheckedForm
from mettle.hub.routes.looking import looking
from mettle.web.problems import HttpError

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])
PAGE_SIZE = 40
Kind = Literal["html", "md", "json"]
FILES: Final[dict[Kind, str]] = {"html": "text/html", "md": "text/markdown", "json": "application/json"}
"""What a comparison is handed over as, and how an answer calls it."""


@router.get("/evaluations")
def evaluations_page(
    request: Request, lab: LabHere, caller: Anybody, words: Annotated[str, Query(max_length=200)] = "",
    environment: Annotated[str, Query(max_length=160)] = "", mine: str = "",
    number: Annotated[int, Query(alias="page", ge=1, le=100_000)] = 1,
) -> HTMLResponse:  # fmt: skip
    """What was pushed, what this machine's store has, and the leaderboard of an environment."""
    with lab.database.read() as c:
        found, total = pushed.list_results(
            c, caller, words=words, environment=environment, is_mine=bool(mine), limit=PAGE_SIZE,
            offset=(number - 1) * PAGE_SIZE,
        )  # fmt: skip
        board = pushed_board(c, caller, environment) if environment else []
    is_shown = may_see_local(lab, caller) and not (words or mine)
    here = catalog_of(request).evaluations
    own = [] if not is_shown else here.on(environment) if environment else list(here.own().items())
    places = leaderboard([*board, *rank_local(own)]) if environment else []
    kept = [("words", words), ("environment", environment), ("mine", mine)]
    return page(
        "results.html", found=found, total=total, words=words, environment=environment, mine=mine, number=number,
        num_pages=max(1, -(-total // PAGE_SIZE)), query=query_of([(k, v) for k, v in kept if v]),
        places=places[:MAX_SHOWN], num_places=len(places),
        evaluations=[card_of(name, entry) for name, entry in own[:PAGE_SIZE]],
        base="/evaluations",
    )  # fmt: skip


Chosen = Annotated[list[str], Query(max_length=MAX_EVALUATIONS, default_factory=list)]


@router.get("/compare")
def compare_page(request: Request, lab: LabHere, caller: Anybody, e: Chosen) -> HTMLResponse:
    """Evaluations on the tasks that all have."""
    ranking, found = rank_chosen(request, lab, caller, e)
    by_word = dict(zip((s.word for s in ranking.standings), found, strict=True))
    files = [(kind, f"/compare/file?{query_of([('format', kind), *(('e', name) for name in e)])}") for kind in FILES]
    return page("compare.html", ranking=ranking, by_word=by_word, files=files)


@router.get("/compare/file")
def compare_file(
    request: Request, lab: LabHere, caller: Anybody, e: Chosen, kind: Annotated[Kind, Query(alias="format")] = "html"
) -> Response:
    """The same as one file to hand over: a page, Markdown, or JSON."""
    ranking, _ = rank_chosen(request, lab, caller, e)
    headers = {"content-disposition": f'attachment; filename="comparison.{kind}"'}
    return Response(WRITERS[f".{kind}"](ranking), media_type=FILES[kind], headers=headers)


@router.post("/evaluations/{result_id:result}")
def change(lab: LabHere, caller: SignedIn, result_id: str, fields: CheckedForm) -> Response:
    """Share it, take that back, or delete it."""
    action = fields.get("action", "")
    with lab.database.write() as c:
        found = pushed.find_result(c, caller, result_id)
        pushed.must_own(caller, found)
        if action in ("share", "unshare"):
            pushed.change_result(c, found, is_public=action == "share")
        elif action == "delete":
            pushed.delete_result(c, lab.folder, found)
        else:
            raise HttpError(400, f"there is no action {action[:40]!r}")
        audit.note(c, caller.name, f"evaluation.{action}", found.name, address=caller.address)
    return RedirectResponse("/evaluations" if action == "delete" else f"/evaluations/{result_id}", status_code=303)


@router.get("/dashboard/evaluations/{result_id:result}")
def old_address(result_id: str) -> Response:
    """Where the field's clients send people."""
    return RedirectResponse(f"/evaluations/{result_id}", status_code=307)


def open_pushed(request: Request, name: str) -> OpenEvaluation:
    """A pushed evaluation for the pages of evaluations. Raises: HttpError 404 when it is not for the caller."""
    lab = lab_of(request)
    caller = caller_of(request, lab)
    if caller.person is not None and not caller.may("evals:read"):
        raise HttpError(403, "this token does not cover evals:read; make one that does", code="scope_missing")
    with lab.database.read() as c:
        found = pushed.find_result(c, caller, name)
    pushed.must_be_completed(found)
    return catalog_of(request).evaluations.open_at(pushed.folder_of(lab.folder, name).resolve(), None)
