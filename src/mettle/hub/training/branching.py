"""A new run from a version of an earlier one: its weights, or its adapter merged into its base, and the steps left.

Parts: `start_from` (queue it), `start_folder` (where the worker has the weights written as a model directory first).
The new run has the settings of the earlier one, and as many steps as that had left; it draws its tasks anew, and its
optimiser begins anew. The earlier run stays as it is: what it has trained stays trained.
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
    config |= {"model": model, "max_steps": left, START: {"run": job.id, "version": version}}
    made = jobs.submit(
        c, caller, job.owner_id, name=f"{job.name[:180]} from v{version}", model=job.model,
        environments=job.environments, config=config, planned=planned,
    )  # fmt: skip
    audit.note(c, caller.name, "run.restart", job.name, detail=f"from v{version}", address=caller.address)
    return made


def _part_of(planned: dict[str, Any], share: float) -> dict[str, Any]:
    """What a share of a run will take."""
    scaled = {name: planned[name] * share for name in ("seconds", "usd") if planned.get(name) is not None}
    kept = {name: value for name, value in planned.items() if name != "is_resumed"}
    return {**kept, **scaled, "num_tokens": round(planned["num_tokens"] * share)}
