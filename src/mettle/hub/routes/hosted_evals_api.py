"""Hosted evaluations for programs: start, follow, stop. Paths and fields are those of the field."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from sqlalchemy import Connection

from mettle.hub.access import EvalWriter, LabHere
from mettle.hub.accounts import audit
from mettle.hub.caller import Caller
from mettle.hub.evaluating.acceptance import accept_evaluation
from mettle.hub.evaluating.outcome import evaluation_folder
from mettle.hub.evaluating.source import LOG
from mettle.hub.evaluating.submission import HostedEvaluation
from mettle.hub.lab import Lab
from mettle.hub.logs import hide
from mettle.hub.results import pushed
from mettle.hub.routes.addresses import root_of
from mettle.hub.routes.json_bodies import body_of
from mettle.hub.training import jobs
from mettle.hub.training.jobs import TrainingJob
from mettle.hub.training.submission import offered_models
from mettle.hub.training.told import hidden_of
from mettle.web.problems import HttpError

router = APIRouter(prefix="/api/v1/hosted-evaluations", tags=["evaluations"])
TAIL_BYTES = 200_000


@router.post("", status_code=201)
def start(
    request: Request, lab: LabHere, caller: EvalWriter,
    asked: Annotated[HostedEvaluation, body_of(HostedEvaluation)],
) -> dict[str, Any]:  # fmt: skip
    """Queue one; its results appear under the id that is answered."""
    job = accept_evaluation(lab, caller, asked)
    with lab.database.read() as c:
        ahead = jobs.num_ahead(c, job)
    return {
        "evaluation_id": job.result_id, "evaluation_ids": [job.result_id], "sandbox_id": None, "status": "PENDING",
        "error": None, "runs_ahead": ahead, "viewer_url": f"{root_of(request)}/hosted-evaluations/{job.result_id}",
    }  # fmt: skip


@router.get("/models")
def models(lab: LabHere, caller: EvalWriter) -> dict[str, Any]:
    """The models of this machine; endpoints elsewhere, and versions of hosted runs, do as well."""
    return {"models": [{"id": each.name} for each in offered_models(lab.models) if each.path is not None]}


@router.get("/{result_id:result}/logs")
def logs(lab: LabHere, caller: EvalWriter, result_id: str) -> dict[str, Any]:
    """The end of what it writes."""
    with lab.database.read() as c:
        job = job_of(c, caller, result_id)
    return {"logs": log_of(lab, job), "sandbox_id": None, "evaluation_id": result_id, "error": job.error or None}


@router.patch("/{result_id:result}/cancel")
def cancel(lab: LabHere, caller: EvalWriter, result_id: str) -> dict[str, Any]:
    """End it."""
    with lab.database.write() as c:
        status = stop_evaluation(c, caller, result_id)
    return {"success": True, "message": "it is ended", "evaluation_id": result_id, "status": status}


def stop_evaluation(c: Connection, caller: Caller, result_id: str) -> str:
    """Ask for its end. Raises: HttpError 404 for one that is not the caller's, 409 for one that is over."""
    job = job_of(c, caller, result_id)
    jobs.want_stop(c, job)
    if job.status == jobs.QUEUED:
        pushed.set_status(c, result_id, pushed.CANCELLED)
    audit.note(c, caller.name, "evaluation.stop", job.name, address=caller.address)
    return pushed.CANCELLED if job.status == jobs.QUEUED else pushed.RUNNING


def job_of(c: Connection, caller: Caller, result_id: str) -> TrainingJob:
    """The job behind a hosted evaluation. Raises: HttpError 404 for one that is not there, or not the caller's."""
    job = jobs.find_by_result(c, caller, result_id)
    if job is None:
        raise HttpError(404, f"there is no hosted evaluation {result_id[:60]} of yours")
    return job


def log_of(lab: Lab, job: TrainingJob) -> str:
    """The end of its log, without its secrets and without the folder that it ran in."""
    path = evaluation_folder(lab.folder, job.id) / LOG
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    text = text.partition("\n")[2] if size > TAIL_BYTES else text
    # Where the Hub's folder lies on its machine is nothing that people who evaluate need to know.
    return hide(text.replace(f"{path.parent}/", ""), hidden_of(lab, job))
