"""What a job's processes are told by their environment, and what is hidden where their logs are shown."""

from __future__ import annotations

import json

from sqlalchemy import Connection

from mettle.errors import StorageError
from mettle.hub.lab import Lab
from mettle.hub.secrets.store import JobEnvironment, job_environment
from mettle.hub.training import jobs
from mettle.hub.training.jobs import TrainingJob
from mettle.hub.training.surroundings import own_environment


def environment_for(c: Connection, lab: Lab, job: TrainingJob) -> dict[str, str]:
    """The environment of its process: this server's without what opens something, and the secrets of its owner."""
    return {**own_environment(), **told_values(c, lab, job)}


def told_values(c: Connection, lab: Lab, job: TrainingJob) -> dict[str, str]:
    """The secrets and variables of its owner that it is told.

    What it is told is sealed beside the job, so that its logs are shown without it for as long as they are kept.
    """
    told = job_environment(c, lab.vault, job.owner_id, job.environments)
    said = json.dumps({"values": told.values, "secret": told.secret})
    jobs.set_values(c, job.id, sealed=lab.vault.seal(said, job.id) if told.values else "")
    return told.values


def hidden_of(lab: Lab, job: TrainingJob) -> list[tuple[str, str]]:
    """What its logs are shown without. Raises: StorageError when nobody knows any more: the key is gone."""
    if not job.sealed:
        return []
    try:
        told = json.loads(lab.vault.open(job.sealed, job.id))
        return JobEnvironment(told["values"], tuple(told["secret"])).hidden()
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"what the logs of {job.id} hide cannot be read: {error}") from error
