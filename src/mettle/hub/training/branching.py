"""A new run from a version of an earlier one, with the settings of that one and the steps that it had left.

Where there is a checkpoint of the version the new run is a branch of the earlier one (`mettle.runs.branch`): weights,
optimiser, tasks and figures go on. Of any other version there are the weights alone (an adapter is merged into its
base): the new run draws its tasks anew, and its optimiser begins anew. Parts: `start_from` (queue it), `start_folder`
(where the worker has the weights of such a version written as a model directory first). The earlier run stays as it is:
what it has trained stays trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from mettle.hub.accounts import audit
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.training import jobs, usage
from mettle.hub.training.jobs import TrainingJob
from mettle.hub.training.versions import versions_on_disk
from mettle.storage.checkpoints import newest_checkpoint
from mettle.storage.run_dir import RunDir
from mettle.web.problems import HttpError

START = "start"
"""Key of a job's config that says which run and version it begins from."""


def start_folder(root: Path, job_id: str) -> Path:
    """The model directory that a run from a version begins with."""
    return root / "runs" / f"{job_id}.start"


def start_from(c: Connection, lab: Lab, caller: Caller, job: TrainingJob, version: int) -> TrainingJob:
    """Queue a run that goes on from a version of another.

    Raises: HttpError 404 for a version that is not on disk, 409 for the last one, 403 and 429 as for any submission.
    """
    known = [number for number, _ in versions_on_disk(lab.folder, job.id)]
    if version not in known:
        has = ", ".join(f"v{number}" for number in known) or "nothing yet"
        raise HttpError(404, f"run {job.id} has no v{version} on disk; it has {has}", param="step")
    left = job.config["max_steps"] - version
    if left <= 0:
        raise HttpError(409, f"v{version} is the last version of this run: no step is left to train from it")
    planned = None if job.planned is None else _part_of(job.planned, left / job.config["max_steps"])
    usage.must_have_room(c, job.owner_id, int((planned or {}).get("num_tokens", 0)))
    model = {"lora": job.config["model"]["lora"]} if job.config["model"].get("lora") else {}
    config = {name: value for name, value in job.config.items() if name not in ("warm_up", "name", START)}
    if is_branch := _has_checkpoint(lab.folder, job, version):
        config = dict(job.config)
    else:
        config |= {"model": model, "max_steps": left}
    config[START] = {"run": job.id, "version": version, "is_branch": is_branch}
    made = jobs.submit(
        c, caller, job.owner_id, name=f"{job.name[:180]} from v{version}", model=job.model,
        environments=job.environments, config=config, planned=planned,
    )  # fmt: skip
    audit.note(c, caller.name, "run.restart", job.name, detail=f"from v{version}", address=caller.address)
    return made


def _has_checkpoint(root: Path, job: TrainingJob, version: int) -> bool:
    """Not of a run whose model lies in its start folder: that would go with the earlier run."""
    if not job.config.get(START, {"is_branch": True}).get("is_branch"):
        return False
    found = newest_checkpoint(RunDir(jobs.run_folder(root, job.id)).checkpoints, at_step=version)
    return version > 0 and found is not None


def _part_of(planned: dict[str, Any], share: float) -> dict[str, Any]:
    """What a share of a run will take."""
    scaled = {name: planned[name] * share for name in ("seconds", "usd") if planned.get(name) is not None}
    kept = {name: value for name, value in planned.items() if name != "is_resumed"}
    return {**kept, **scaled, "num_tokens": round(planned["num_tokens"] * share)}
