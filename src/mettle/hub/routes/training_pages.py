"""The pages of hosted training: the queue, the form, and the buttons of a run."""

from __future__ import annotations

import tomllib

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import ValidationError
from starlette.responses import Response

from mettle.hub.access import LabHere, SignedIn
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.pages import page
from mettle.hub.routes.addresses import root_of
from mettle.hub.routes.forms import CheckedForm
from mettle.hub.routes.looking import looking
from mettle.hub.routes.training_api import change_job
from mettle.hub.training import jobs
from mettle.hub.training.acceptance import accept
from mettle.hub.training.branching import start_from
from mettle.hub.training.submission import BUILT_IN, Submission, offered_models
from mettle.hub.training.versions import shown_versions
from mettle.hub.training_service.offers import shown_services
from mettle.web.bodies import first_fault
from mettle.web.problems import HttpError

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])

EXAMPLE = f"""model = "{BUILT_IN}"
max_steps = 100
batch_size = 256
rollouts_per_example = 16
learning_rate = 3e-4

[sampling]
max_tokens = 8

[[env]]
id = "reverse-text"
"""


@router.get("/training")
def training_page(request: Request, lab: LabHere, caller: SignedIn) -> HTMLResponse:
    """The queue, and the form."""
    return _training(request, lab, caller, EXAMPLE)


@router.post("/training")
def submit(request: Request, lab: LabHere, caller: SignedIn, fields: CheckedForm) -> Response:
    """Queue the run of a TOML."""
    text = fields.get("toml", "")
    try:
        asked = Submission.model_validate(tomllib.loads(text))
        accept(lab, caller, asked.model_copy(update={"override_card": fields.get("override_card") == "1"}))
    except tomllib.TOMLDecodeError as error:
        return _training(request, lab, caller, text, f"this is no TOML: {error}", 400)
    except ValidationError as error:
        place, words = first_fault(error.errors())
        return _training(request, lab, caller, text, f"{place}: {words}", 400)
    except HttpError as error:
        return _training(request, lab, caller, text, str(error), 400)
    return RedirectResponse("/training", status_code=303)


@router.get("/training/{run_id}")
def versions_page(lab: LabHere, caller: SignedIn, run_id: str) -> HTMLResponse:
    """The versions of a run that are on disk, to download or to start a run from."""
    _must_read(caller)
    with lab.database.read() as c:
        job = jobs.find_job(c, caller, run_id)
    return page("run_versions.html", job=job, versions=shown_versions(lab.folder, run_id))


@router.post("/training/{run_id}")
def change(request: Request, lab: LabHere, caller: SignedIn, run_id: str, fields: CheckedForm) -> Response:
    """Stop it, let it go on, or start another from a version of it."""
    action, step = fields.get("action", ""), fields.get("step", "")
    with lab.database.write() as c:
        job = jobs.find_job(c, caller, run_id)
        if action == "restart" and step:
            if not (step.isascii() and step.isdigit() and len(step) < 10):
                raise HttpError(400, f"{step[:40]!r} is no version")
            start_from(c, lab, caller, job, int(step))
        else:
            change_job(c, caller, job, action)
    return RedirectResponse("/training", status_code=303)


@router.get("/dashboard/training/{run_id}")
def old_address(run_id: str) -> Response:
    """Where the field's clients send people."""
    return RedirectResponse(f"/runs/{run_id}", status_code=307)


def _training(
    request: Request, lab: Lab, caller: Caller, text: str, problem: str = "", status: int = 200
) -> HTMLResponse:
    _must_read(caller)
    with lab.database.read() as c:
        found, total = jobs.list_jobs(c, caller, limit=100)
        ahead = {job.id: jobs.num_ahead(c, job) for job in found}
    answer = page(
        "training.html", jobs=found, total=total, ahead=ahead, text=text, problem=problem,
        models=[each.name for each in offered_models(lab.models)],
        services=shown_services(lab.folder, lab.train_offers, root_of(request)),
    )  # fmt: skip
    answer.status_code = status
    return answer


def _must_read(caller: Caller) -> None:
    if not caller.may("training:read"):
        raise HttpError(403, "this token does not cover training:read; make one that does", code="scope_missing")
