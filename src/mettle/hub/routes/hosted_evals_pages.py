"""The pages of hosted evaluations: the form, and one that waits or runs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import ValidationError
from starlette.responses import Response

from mettle.envs.packages.registry import list_environments
from mettle.hub.access import LabHere, SignedIn
from mettle.hub.caller import Caller
from mettle.hub.evaluating.acceptance import accept_evaluation
from mettle.hub.evaluating.submission import HostedEvaluation
from mettle.hub.lab import Lab
from mettle.hub.pages import page
from mettle.hub.results import pushed
from mettle.hub.routes import addresses  # noqa: F401 - the kind of path that ids of results are
from mettle.hub.routes.forms import CheckedForm
from mettle.hub.routes.hosted_evals_api import job_of, log_of, stop_evaluation
from mettle.hub.routes.looking import looking
from mettle.hub.training.submission import offered_models
from mettle.web.bodies import first_fault
from mettle.web.problems import HttpError

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])


@router.get("/hosted-evaluations")
def form_page(lab: LabHere, caller: SignedIn, environment: str = "", model: str = "") -> HTMLResponse:
    """The form of a new one."""
    return _form(lab, caller, {"environment": environment[:200], "model": model[:200]})


@router.post("/hosted-evaluations")
def submit(lab: LabHere, caller: SignedIn, fields: CheckedForm) -> Response:
    """Queue what the form says."""
    try:
        asked = HostedEvaluation.model_validate(_body(fields))
        job = accept_evaluation(lab, caller, asked)
    except ValidationError as error:
        place, words = first_fault(error.errors())
        return _form(lab, caller, fields, f"{place}: {words}", 400)
    except HttpError as error:
        return _form(lab, caller, fields, str(error), 400)
    return RedirectResponse(f"/hosted-evaluations/{job.result_id}", status_code=303)


@router.get("/hosted-evaluations/{result_id:result}")
def evaluation_page(request: Request, lab: LabHere, caller: SignedIn, result_id: str) -> Response:
    """One: its state and log until it is completed, then its results. A page that asks for itself is sent there as a
    whole: a redirect would leave it at this address, with the results in the place of the log."""
    _must(caller)
    with lab.database.read() as c:
        job, result = job_of(c, caller, result_id), pushed.find_result(c, caller, result_id)
    if result.status == pushed.COMPLETED and request.headers.get("hx-request") == "true":
        return Response(headers={"HX-Redirect": f"/evaluations/{result_id}"})
    if result.status == pushed.COMPLETED:
        return RedirectResponse(f"/evaluations/{result_id}", status_code=307)
    return page("hosted_evaluation.html", job=job, result=result, log=log_of(lab, job))


@router.post("/hosted-evaluations/{result_id:result}")
def stop(lab: LabHere, caller: SignedIn, result_id: str, fields: CheckedForm) -> Response:
    """End it."""
    with lab.database.write() as c:
        stop_evaluation(c, caller, result_id)
    return RedirectResponse(f"/hosted-evaluations/{result_id}", status_code=303)


def _body(fields: dict[str, str]) -> dict[str, Any]:
    said = {name: fields[name].strip() for name in fields if fields[name].strip()}
    config = {
        "num_examples": said.get("num_examples", "20"), "rollouts_per_example": said.get("rollouts", "3"),
        "api_base_url": said.get("api_base_url"), "api_key_var": said.get("api_key_var"),
        "sampling_args": {"max_tokens": int(said["max_tokens"])} if said.get("max_tokens", "").isdigit() else {},
    }  # fmt: skip
    return {
        "environment": said.get("environment", ""), "inference_model": said.get("model", ""), "eval_config": config,
        "is_public": said.get("is_public") == "1", "override_card": said.get("override_card") == "1",
    }  # fmt: skip


def _form(lab: Lab, caller: Caller, fields: dict[str, str], problem: str = "", status: int = 200) -> HTMLResponse:
    _must(caller)
    models = [each.name for each in offered_models(lab.models) if each.path is not None]
    known = [each.name for each in list_environments()]
    answer = page("evaluate.html", fields=fields, problem=problem, models=models, known=known)
    answer.status_code = status
    return answer


def _must(caller: Caller) -> None:
    if not caller.may("evals:write"):
        raise HttpError(403, "this token does not cover evals:write; make one that does", code="scope_missing")
