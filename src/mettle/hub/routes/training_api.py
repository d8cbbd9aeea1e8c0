"""Hosted training for programs: submit, follow, stop, go on, take the adapter. Paths and fields are the field's."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection

from mettle.hub.access import LabHere, TrainingReader, TrainingWriter, caller_of, lab_of
from mettle.hub.accounts import audit
from mettle.hub.caller import Caller
from mettle.hub.catalog import RunCatalog
from mettle.hub.lab import Lab
from mettle.hub.logs import log_names, read_tail
from mettle.hub.metrics import align
from mettle.hub.reader import RunReader
from mettle.hub.routes.addresses import iso, root_of
from mettle.hub.routes.json_bodies import body_of
from mettle.hub.training import jobs, usage
from mettle.hub.training.acceptance import accept
from mettle.hub.training.branching import start_folder, start_from
from mettle.hub.training.jobs import TrainingJob, run_folder
from mettle.hub.training.submission import Submission, offered_models
from mettle.hub.training.told import hidden_of
from mettle.hub.training.versions import versions_on_disk
from mettle.storage.run_dir import RunDir
from mettle.web.problems import HttpError

router = APIRouter(prefix="/api/v1/rft", tags=["training"])

_PRICES = ("trainingPricePerMtok", "inferenceInputPricePerMtok", "inferenceOutputPricePerMtok")


@router.get("/models")
def models(lab: LabHere, caller: TrainingReader) -> dict[str, Any]:
    """What runs can start from."""
    with lab.database.read() as c:
        is_busy = bool(jobs.with_status(c, jobs.RUNNING))
        prices = {each.name: usage.price_of(c, each.name) for each in offered_models(lab.models)}
    return {
        "models": [{"name": name, "atCapacity": is_busy, **dict.fromkeys(_PRICES, usd)} for name, usd in prices.items()]
    }


@router.post("/runs", status_code=201)
def submit(lab: LabHere, caller: TrainingWriter, asked: Annotated[Submission, body_of(Submission)]) -> dict[str, Any]:
    """Check a run as `mettle rl run` does, and queue it."""
    job = accept(lab, caller, asked)
    with lab.database.read() as c:
        return {"run": _shown(c, job)}


@router.get("/runs")
def list_runs(
    lab: LabHere, caller: TrainingReader, page: Annotated[int, Query(ge=1, le=1 << 31)] = 1,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:  # fmt: skip
    """Mine and my teams', the newest first."""
    with lab.database.read() as c:
        found, total = jobs.list_jobs(c, caller, limit=limit, offset=(page - 1) * limit)
        shown = [_shown(c, job) for job in found]
    return {"runs": shown, "total": total, "page": page, "limit": limit, "total_pages": max(1, -(-total // limit))}


@router.get("/runs/{run_id}")
def read_run(lab: LabHere, caller: TrainingReader, run_id: str) -> dict[str, Any]:
    """One."""
    with lab.database.read() as c:
        return {"run": _shown(c, jobs.find_job(c, caller, run_id))}


@router.put("/runs/{run_id}/stop")
def stop_run(lab: LabHere, caller: TrainingWriter, run_id: str) -> dict[str, Any]:
    """End it after the step that it is in; it can go on later."""
    return _change(lab, caller, run_id, "stop")


@router.put("/runs/{run_id}/restart")
def restart_run(
    lab: LabHere, caller: TrainingWriter, run_id: str, step: Annotated[int | None, Query(ge=0, le=1 << 31)] = None
) -> dict[str, Any]:
    """Let it go on from its last checkpoint; with `step`, queue a new run that begins from that version of it."""
    if step is None:
        return _change(lab, caller, run_id, "restart")
    with lab.database.write() as c:
        made = start_from(c, lab, caller, jobs.find_job(c, caller, run_id), step)
        return {"run": _shown(c, made)}


@router.delete("/runs/{run_id}")
def delete_run(lab: LabHere, caller: TrainingWriter, run_id: str) -> dict[str, Any]:
    """Delete it with its directory."""
    with lab.database.write() as c:
        job = jobs.find_job(c, caller, run_id)
        jobs.delete_job(c, job)
        audit.note(c, caller.name, "run.delete", job.name, address=caller.address)
    for folder in (run_folder(lab.folder, run_id), start_folder(lab.folder, run_id)):
        shutil.rmtree(folder, ignore_errors=True)
    return {"success": True}


@router.get("/runs/{run_id}/logs")
def logs(
    lab: LabHere, caller: TrainingReader, run_id: str, tail_lines: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    component: str = "orchestrator", search: str = "", level: str = "",
) -> dict[str, Any]:  # fmt: skip
    """The end of what one of its processes writes."""
    with lab.database.read() as c:
        job = jobs.find_job(c, caller, run_id)
    folder = RunDir(run_folder(lab.folder, run_id))
    name = next((n for n in log_names(folder.logs) if n.partition(".")[0] == component), None)
    if name is None:
        raise HttpError(404, f"no log of {component[:60]!r} yet: the run is queued, or starting")
    entries, _ = read_tail(
        folder.logs, name, max_lines=tail_lines, level=level or None, words=search, hidden=hidden_of(lab, job)
    )
    return {"logs": "\n".join(str(entry.get("message") or entry.get("text") or "") for entry in entries)}


@router.get("/runs/{run_id}/metrics")
def metrics(
    request: Request, lab: LabHere, caller: TrainingReader, run_id: str, min_step: int = -1,
    max_step: int = 1 << 40, limit: Annotated[int, Query(ge=1, le=100_000)] = 10_000,
) -> dict[str, Any]:  # fmt: skip
    """Every metric, a row for each step."""
    with lab.database.read() as c:
        jobs.find_job(c, caller, run_id)
    if not (run_folder(lab.folder, run_id) / "run.db").exists():
        return {"metrics": []}
    run = _catalog(request).open(run_id)
    with run.lock:
        run.refresh()
        steps, columns = align((name, run.metrics.after(name, min_step - 1)) for name in run.metrics.names)
    rows = [
        {"step": step, **{name: column[i] for name, column in columns.items() if column[i] is not None}}
        for i, step in enumerate(steps)
        if step <= max_step
    ]
    return {"metrics": rows[-limit:]}


@router.get("/runs/{run_id}/checkpoints")
def checkpoints(request: Request, lab: LabHere, caller: TrainingReader, run_id: str) -> dict[str, Any]:
    """The versions of weights or adapters that are still on disk."""
    with lab.database.read() as c:
        jobs.find_job(c, caller, run_id)
    return {"checkpoints": [_checkpoint(request, run_id, *each) for each in versions_on_disk(lab.folder, run_id)]}


@router.get("/runs/{run_id}/checkpoints/{step}")
def download(lab: LabHere, caller: TrainingReader, run_id: str, step: int) -> StreamingResponse:
    """A version as a tar: an adapter as peft loads it, or whole weights."""
    with lab.database.read() as c:
        jobs.find_job(c, caller, run_id)
    found = dict(versions_on_disk(lab.folder, run_id)).get(step)
    if found is None:
        raise HttpError(404, f"version {step} of this run is not on disk any more")
    headers = {"content-disposition": f'attachment; filename="{run_id}-v{step}.tar"'}
    return StreamingResponse(_tar(found), media_type="application/x-tar", headers=headers)


def open_hosted(request: Request, name: str) -> RunReader:
    """The reader of a hosted run for the pages of runs. Raises: HttpError 404 when it is not the caller's."""
    lab = lab_of(request)
    caller = caller_of(request, lab)
    if caller.person is None:
        raise HttpError(401, "sign in to see this run", code="invalid_api_key")
    if not caller.may("training:read"):
        raise HttpError(403, "this token does not cover training:read; make one that does", code="scope_missing")
    with lab.database.read() as c:
        job = jobs.find_job(c, caller, name)
    if not (run_folder(lab.folder, name) / "run.db").exists():
        said = f"this run is {job.status.lower()} and has written nothing yet; the page looks again by itself"
        raise HttpError(404, said, headers={"Refresh": "3"})
    reader = _catalog(request).open(name)
    reader.hidden, reader.title = hidden_of(lab, job), job.name
    return reader


def change_job(c: Connection, caller: Caller, job: TrainingJob, action: str) -> None:
    """Stop a run, or let it go on. Raises: HttpError 409 when that makes no sense now."""
    if action == "stop":
        jobs.want_stop(c, job)
    elif action == "restart":
        planned = int((job.planned or {}).get("num_tokens", 0))
        usage.must_have_room(c, job.owner_id, max(0, planned - job.num_tokens))
        jobs.queue_again(c, job)
    else:
        raise HttpError(400, f"there is no action {action[:40]!r}")
    audit.note(c, caller.name, f"run.{action}", job.name, address=caller.address)


def _change(lab: Lab, caller: Caller, run_id: str, action: str) -> dict[str, Any]:
    with lab.database.write() as c:
        change_job(c, caller, jobs.find_job(c, caller, run_id), action)
        return {"run": _shown(c, jobs.find_job(c, caller, run_id))}


def _catalog(request: Request) -> RunCatalog:
    catalog: RunCatalog = request.app.state.hosted
    return catalog


def _checkpoint(request: Request, run_id: str, step: int, path: Path) -> dict[str, Any]:
    files = [file for file in path.rglob("*") if file.is_file()]
    at = iso(path.stat().st_mtime)
    return {
        "id": f"{run_id}-v{step}", "rftRunId": run_id, "step": step, "status": "READY",
        "storageUrl": f"{root_of(request)}/api/v1/rft/runs/{run_id}/checkpoints/{step}",
        "sizeBytes": sum(file.stat().st_size for file in files), "createdAt": at, "uploadedAt": at,
    }  # fmt: skip


def _tar(folder: Path) -> Iterator[bytes]:
    """A tar of a folder, piece by piece: weights are larger than memory."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        info = tarfile.TarInfo(path.relative_to(folder).as_posix())
        info.size = path.stat().st_size
        yield info.tobuf()
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk
        yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield io.BytesIO(bytes(2 * tarfile.BLOCKSIZE)).getvalue()


def _shown(c: Connection, job: TrainingJob) -> dict[str, Any]:
    ahead = jobs.num_ahead(c, job)
    planned = job.planned or {}
    config, loop = job.config, job.config["orchestrator"]
    optim, lora = (config.get("trainer") or {"optim": {}})["optim"], config["model"].get("lora") or {}
    return {
        "id": job.id, "name": job.name, "userId": job.submitted_by, "teamId": None, "rftClusterId": "this-machine",
        "status": job.status, "kind": "SHARED_RFT_HOSTED", "baseModel": job.model,
        "rolloutsPerExample": loop["group_size"], "seqLen": planned.get("seq_len", 0), "maxSteps": config["max_steps"],
        "batchSize": loop["batch_size"], "maxTokens": (loop.get("sampling") or {}).get("max_tokens"),
        "environments": [{"id": each} for each in job.environments], "runConfig": config,
        "learningRate": optim.get("lr"), "loraAlpha": lora.get("alpha"), "runsAhead": ahead,
        "queueReason": f"{ahead} runs are before it" if ahead else None, "errorMessage": job.error or None,
        "createdAt": iso(job.created_at), "updatedAt": iso(job.updated_at), "startedAt": iso(job.started_at),
        "completedAt": iso(job.ended_at), "numTokens": job.num_tokens, "plannedTokens": planned.get("num_tokens"),
        "plannedSeconds": planned.get("seconds"), "plannedMemoryBytes": planned.get("memory_bytes"),
        "plannedUsd": planned.get("usd"), "planBasis": planned.get("basis"),
    }  # fmt: skip
