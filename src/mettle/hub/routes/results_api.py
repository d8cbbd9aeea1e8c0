"""Evaluations for programs: push results, list, read, rank, compare. Paths and fields are those of the field."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field
from sqlalchemy import Connection

from mettle.hub.access import EvalReader, EvalWriter, LabHere
from mettle.hub.accounts import audit
from mettle.hub.api import catalog_of
from mettle.hub.caller import Caller, owner_of
from mettle.hub.registry import catalogue
from mettle.hub.results import pushed
from mettle.hub.results.board import pushed_board
from mettle.hub.results.leaderboard import Ranked, leaderboard, rank_local
from mettle.hub.results.pushed import Described, PushedResult
from mettle.hub.routes.addresses import iso, root_of
from mettle.hub.routes.chosen import may_see_local, rank_chosen
from mettle.hub.routes.json_bodies import HubRequest, body_of

MAX_SAMPLES_BYTES = 64 << 20


router = APIRouter(prefix="/api/v1/evaluations", tags=["evaluations"])


class EvaluationAsked(HubRequest):
    name: str = Field(min_length=1, max_length=200)
    environments: list[dict[str, Any]] = Field(default_factory=list, max_length=10)
    environment: str = Field(default="", max_length=160)
    model_name: str = Field(default="", max_length=200)
    dataset: str | None = None
    framework: str | None = Field(default="", max_length=60)
    metadata: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    team_id: str | None = None
    is_public: bool = False


class SamplesAsked(HubRequest):
    samples: list[dict[str, Any]] = Field(max_length=100_000)


class FinalizeAsked(HubRequest):
    metrics: dict[str, Any] | None = None


class EvaluationChanged(HubRequest):
    name: str | None = Field(default=None, min_length=1, max_length=200)
    is_public: bool | None = None


class CompareAsked(HubRequest):
    evaluation_ids: list[str] = Field(min_length=2, max_length=26)


@router.post("/", status_code=201)
def create(
    request: Request, lab: LabHere, caller: EvalWriter, asked: Annotated[EvaluationAsked, body_of(EvaluationAsked)]
) -> dict[str, Any]:
    """A new evaluation, whose samples follow."""
    owner_id = owner_of(caller, asked.team_id)
    with lab.database.write() as c:
        environment, environment_id = _environment(c, caller, asked)
        told = Described(
            asked.name, environment, environment_id, asked.model_name, asked.is_public, asked.framework or "",
            asked.metadata or {}, asked.metrics or {},
        )  # fmt: skip
        made = pushed.create_result(c, caller, owner_id, told)
        audit.note(c, caller.name, "evaluation.create", made.name, address=caller.address)
    return _shown(made, request)


@router.post("/{result_id:result}/samples")
def add_samples(
    lab: LabHere,
    caller: EvalWriter,
    result_id: str,
    asked: Annotated[SamplesAsked, body_of(SamplesAsked, MAX_SAMPLES_BYTES)],
) -> dict[str, Any]:
    """Add samples; several requests may do so at once."""
    with lab.database.write() as c:
        found = _mine(c, caller, result_id)
        pushed.add_samples(c, lab.folder, found, asked.samples)
    return {"evaluation_id": result_id, "samples_pushed": len(asked.samples), "status": found.status}


@router.post("/{result_id:result}/finalize")
def finalize(
    request: Request,
    lab: LabHere,
    caller: EvalWriter,
    result_id: str,
    asked: Annotated[FinalizeAsked, body_of(FinalizeAsked)],
) -> dict[str, Any]:
    """Close it: its mean and interval are worked out from the samples."""
    with lab.database.write() as c:
        done = pushed.complete(c, lab.folder, _mine(c, caller, result_id), asked.metrics or {})
    return _shown(done, request)


@router.get("/")
def list_evaluations(
    request: Request, lab: LabHere, caller: EvalReader, environment_name: str = "", environment_id: str = "",
    skip: Annotated[int, Query(ge=0, le=1 << 31)] = 0, limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:  # fmt: skip
    """The newest first."""
    with lab.database.read() as c:
        found, total = pushed.list_results(
            c, caller, environment=environment_name, environment_id=environment_id, limit=limit, offset=skip
        )
    return {"evaluations": [_shown(each, request) for each in found], "total": total, "skip": skip, "limit": limit}


@router.post("/compare")
def compare(
    request: Request, lab: LabHere, caller: EvalReader, asked: Annotated[CompareAsked, body_of(CompareAsked)]
) -> dict[str, Any]:
    """Evaluations on the tasks that all have: means with intervals, and each pair's difference, paired by task."""
    return rank_chosen(request, lab, caller, asked.evaluation_ids)[0].to_dict()


@router.get("/leaderboard")
def ranked(request: Request, lab: LabHere, caller: EvalReader, environment: str) -> dict[str, Any]:
    """The models on an environment; those whose intervals overlap share a place. `is_local`: of this machine."""
    with lab.database.read() as c:
        found = pushed_board(c, caller, environment)
    here = catalog_of(request).evaluations.on(environment) if may_see_local(lab, caller) else []
    places = leaderboard([*found, *rank_local(here)])
    return {"places": [{"place": p.shown, "first": p.first, "last": p.last, **_row(p.result)} for p in places]}


@router.get("/{result_id:result}")
def read(request: Request, lab: LabHere, caller: EvalReader, result_id: str) -> dict[str, Any]:
    """One evaluation."""
    with lab.database.read() as c:
        return _shown(pushed.find_result(c, caller, result_id), request)


@router.get("/{result_id:result}/samples")
def samples(
    lab: LabHere, caller: EvalReader, result_id: str, page: Annotated[int, Query(ge=1, le=1 << 31)] = 1,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:  # fmt: skip
    """A page of its samples, as they were pushed."""
    with lab.database.read() as c:
        found = pushed.find_result(c, caller, result_id)
    first = (page - 1) * limit
    rows = pushed.samples_of(lab.folder, found, first, limit) if first < found.num_samples else []
    pages = max(1, -(-found.num_samples // limit))
    shown = {"samples": rows, "total": found.num_samples, "page": page, "limit": limit, "total_pages": pages}
    return {"evaluation_id": result_id, **shown, "has_more": page < pages}


@router.put("/{result_id:result}")
def change(
    request: Request, lab: LabHere, caller: EvalWriter, result_id: str,
    asked: Annotated[EvaluationChanged, body_of(EvaluationChanged)],
) -> dict[str, Any]:  # fmt: skip
    """Another name, or who sees it."""
    with lab.database.write() as c:
        found = _mine(c, caller, result_id)
        values = {name: value for name, value in asked.model_dump().items() if value is not None}
        pushed.change_result(c, found, **values)
        audit.note(c, caller.name, "evaluation.change", found.name, detail=str(values), address=caller.address)
        return _shown(pushed.find_result(c, caller, result_id), request)


@router.delete("/{result_id:result}")
def delete(lab: LabHere, caller: EvalWriter, result_id: str) -> dict[str, Any]:
    """Delete it with its samples."""
    with lab.database.write() as c:
        found = _mine(c, caller, result_id)
        pushed.delete_result(c, lab.folder, found)
        audit.note(c, caller.name, "evaluation.delete", found.name, address=caller.address)
    return {"success": True}


def _mine(c: Connection, caller: Caller, result_id: str) -> PushedResult:
    found = pushed.find_result(c, caller, result_id, is_locked=True)
    pushed.must_own(caller, found)
    return found


def _environment(c: Connection, caller: Caller, asked: EvaluationAsked) -> tuple[str, str | None]:
    """What was evaluated: an environment of this Hub where one is named, or a name."""
    for each in asked.environments:
        known = catalogue.environment_by_id(c, caller, str(each.get("id") or ""))
        return known.slug, known.id
    name = asked.environment or asked.dataset or ""
    owner, _, project = name.partition("/")
    if not project:
        return name, None
    known = catalogue.find_environment(c, caller, owner, project.partition("@")[0])
    return known.slug, known.id


def _row(result: Ranked) -> dict[str, Any]:
    return {
        "evaluation_id": result.name, "model_name": result.model, "mean": result.mean,
        "interval": [result.ci_low, result.ci_high], "num_tasks": result.num_tasks, "is_local": result.is_local,
        "environment": result.environment,
    }  # fmt: skip


def _shown(result: PushedResult, request: Request) -> dict[str, Any]:
    return {
        "evaluation_id": result.id, "id": result.id, "name": result.name, "status": result.status,
        "environment_names": [result.environment],
        "environment_ids": [result.environment_id] if result.environment_id else [],
        "model_name": result.model, "framework": result.framework, "metadata": result.metadata,
        "metrics": result.metrics, "total_samples": result.num_samples, "avg_score": result.mean,
        "ci_low": result.ci_low, "ci_high": result.ci_high, "is_public": result.is_public,
        "is_hosted": bool(result.metadata.get("is_hosted")),
        "eval_type": "environment", "user_id": result.pushed_by,
        "viewer_url": f"{root_of(request)}/evaluations/{result.id}", "created_at": iso(result.created_at),
        "updated_at": iso(result.updated_at), "completed_at": iso(result.completed_at),
    }  # fmt: skip
