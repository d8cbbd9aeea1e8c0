"""From a checked submission to a job in the queue, the same for programs and for the page."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection

from mettle.hub.accounts import audit
from mettle.hub.actions.gate import must_have_passed
from mettle.hub.caller import Caller, owner_of
from mettle.hub.lab import Lab
from mettle.hub.secrets import store
from mettle.hub.training import jobs
from mettle.hub.training.jobs import TrainingJob
from mettle.hub.training.planning import plan_job
from mettle.hub.training.submission import Submission, offered_models, run_config
from mettle.hub.training.usage import must_have_room
from mettle.web.problems import HttpError

WANDB_KEY: Final = "WANDB_API_KEY"


def accept(lab: Lab, caller: Caller, asked: Submission) -> TrainingJob:
    """Check a run as `mettle rl run` does, and queue it for the caller or a team of theirs.

    Raises: HttpError 403 for a team that is not theirs or a quota that it does not fit in, 409 for an environment whose
    card has failed, 422 for what is not offered, 429 for too many that wait.
    """
    owner_id = owner_of(caller, asked.team_id)
    config, loaded = run_config(asked, offered_models(lab.models))
    names = [each.id for each in asked.environments]
    with lab.database.write() as c:
        must_have_passed(c, caller, names, is_overridden=asked.override_card)
        _must_have_key(c, config, owner_id, names)
        planned = plan_job(c, loaded, asked.model, names)
        must_have_room(c, owner_id, planned["num_tokens"])
        job = jobs.submit(
            c, caller, owner_id, name=asked.name or f"{names[0]} {asked.model}", model=asked.model,
            environments=names, config=config, planned=planned,
        )  # fmt: skip
        audit.note(c, caller.name, "run.submit", job.name, address=caller.address)
        return job


def _must_have_key(c: Connection, config: dict[str, Any], owner_id: str, environments: list[str]) -> None:
    """Raises: HttpError 422 for a run that goes to Weights & Biases without a key."""
    if "tracking" in config and all(s.name != WANDB_KEY for s in store.secrets_for(c, owner_id, environments)):
        raise HttpError(422, f"[wandb] needs a secret: `mettle secret set {WANDB_KEY}` first", param="wandb")
