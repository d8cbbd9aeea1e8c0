"""Evaluations that somebody chose to set beside each other: pushed ones, and those of this machine's store.

Parts: `ChosenEvaluation`, `open_chosen`, `may_see_local`. A name is the id of what was pushed, the name that an
evaluation of this machine has in addresses, or `runs/RUN/evals/ID` for one inside a run. Invariants: who may see none
of this machine's runs chooses none of their evaluations; where files lie on this machine is not told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from fastapi import Request

from mettle.errors import MettleError
from mettle.evals.ranking import Ranking, rank_evaluations
from mettle.evals.reader import EvaluationReader
from mettle.hub.api import PUSHED_ID, catalog_of, open_run
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.results import pushed
from mettle.web.problems import HttpError


@dataclass(frozen=True, slots=True)
class ChosenEvaluation:
    """One evaluation. `address` is its page."""

    name: str
    model: str
    address: str
    reader: EvaluationReader
    is_local: bool


def rank_chosen(
    request: Request, lab: Lab, caller: Caller, names: Sequence[str]
) -> tuple[Ranking, list[ChosenEvaluation]]:
    """The evaluations of these names on the tasks that all have.

    Raises: HttpError 404 for one that is not there or not for the caller, 400 for too few; UserError without a task
    that all have.
    """
    if len(names) < 2:
        raise HttpError(400, "choose two or more evaluations to compare")
    found = [open_chosen(request, lab, caller, name) for name in names]
    return rank_evaluations([each.reader for each in found], [each.name for each in found]), found


def open_chosen(request: Request, lab: Lab, caller: Caller, name: str) -> ChosenEvaluation:
    """One evaluation by its name. Raises: HttpError 404 for one that is not there, or not for the caller."""
    if PUSHED_ID.fullmatch(name):
        with lab.database.read() as c:
            result = pushed.find_result(c, caller, name)
        return ChosenEvaluation(
            result.name, result.model, f"/evaluations/{name}", pushed.reader_of(lab.folder, result), False
        )
    return _open_local(request, name, is_open=may_see_local(lab, caller))


def may_see_local(lab: Lab, caller: Caller) -> bool:
    """Whether the caller sees the runs and evaluations of this machine."""
    return lab.are_runs_open if caller.person is None else caller.may("training:read")


def _open_local(request: Request, name: str, *, is_open: bool) -> ChosenEvaluation:
    catalog = catalog_of(request)
    missing = HttpError(404, f"Evaluation {name[:80]} not found")
    match name.split("/"):
        case ["runs", run, "evals", number] if number.isdecimal() and (is_open or PUSHED_ID.fullmatch(run)):
            # A hosted run is opened for those alone whose it is.
            folder, eval_id = open_run(request, run, catalog).run_dir.path, int(number)
            address = f"/runs/{quote(run, safe='')}/evals/{eval_id}"
            entry = next((e for e in catalog.evaluations.entries(folder) if e.eval_id == eval_id), None)
        case [_] if is_open:
            entry = catalog.evaluations.own().get(name)
            address = f"/evaluations/{quote(name, safe='')}"
        case _:
            raise missing
    if entry is None:
        raise missing
    try:
        reader = EvaluationReader(entry.path, entry.eval_id)
    except MettleError as error:
        raise HttpError(503, f"the evaluation {name[:80]} cannot be read") from error
    return ChosenEvaluation(name, entry.model, address, reader, True)
