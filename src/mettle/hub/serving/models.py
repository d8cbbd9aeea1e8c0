"""Which models a person may ask for: the operator's model directories by name, and versions of hosted runs.

A version is called `RUN:v20`, the newest on disk `RUN` alone, as in hosted evaluations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.training import jobs
from mettle.hub.training.jobs import run_folder
from mettle.hub.training.submission import offered_models
from mettle.hub.training.versions import versions_on_disk
from mettle.web.problems import HttpError

RUN_MODEL: Final = re.compile(r"(?P<run>c[a-z0-9]{24})(?:[:@]v?(?P<version>\d{1,9}))?")
SHOWN_RUNS: Final = 50


@dataclass(frozen=True, slots=True)
class HubModel:
    """One model. `path` is its directory; of a hosted run `run` is that run's, and `version` which weights."""

    name: str
    path: Path | None = None
    run: Path | None = None
    version: int = 0
    title: str = ""
    """What people call it."""


def find_model(c: Connection, lab: Lab, caller: Caller, name: str) -> HubModel:
    """Raises: HttpError 404 for what this Hub does not have, and for a run that is not the caller's."""
    found = RUN_MODEL.fullmatch(name)
    if found is None:
        offered = {each.name: each.path for each in offered_models(lab.models) if each.path}
        if name not in offered:
            names = ", ".join(offered) or "it offers none"
            raise _unknown(f"model {name[:100]!r} is none of this Hub ({names}) and no hosted run (ID or ID:v20)")
        return HubModel(name, offered[name], title=name)
    try:
        job = jobs.find_job(c, caller, found["run"])
    except HttpError as error:
        raise _unknown(str(error)) from error
    known = dict(versions_on_disk(lab.folder, job.id))
    version = int(found["version"]) if found["version"] else max(known, default=-1)
    if version not in known:
        has = ", ".join(f"v{number}" for number in sorted(known)) or "nothing yet"
        raise _unknown(f"run {job.id} has no v{version} on disk; it has {has}")
    return HubModel(f"{job.id}:v{version}", None, run_folder(lab.folder, job.id), version, f"{job.name} v{version}")


def _unknown(message: str) -> HttpError:
    """By its code the OpenAI clients, and what is built on them, know that another name may do."""
    return HttpError(404, message, param="model", code="model_not_found")


def list_models(c: Connection, lab: Lab, caller: Caller) -> list[HubModel]:
    """All that the caller may ask for: the operator's, then the newest version of each of the newest hosted runs."""
    found = [HubModel(each.name, each.path, title=each.name) for each in offered_models(lab.models) if each.path]
    for job in jobs.list_jobs(c, caller, limit=SHOWN_RUNS)[0]:
        versions = versions_on_disk(lab.folder, job.id)
        if versions:
            number = versions[-1][0]
            title = f"{job.name} v{number}"
            found.append(HubModel(f"{job.id}:v{number}", None, run_folder(lab.folder, job.id), number, title))
    return found
