"""From a checked submission to a job in the queue, the same for programs and for the page."""

from __future__ import annotations

from mettle.hub.accounts import audit
from mettle.hub.actions.gate import must_have_passed
from mettle.hub.caller import Caller, owner_of
from mettle.hub.lab import Lab
from mettle.hub.training import jobs
from mettle.hub.training.jobs import TrainingJob
from mettle.hub.training.submission import Submission, offered_models, run_config


def accept(lab: Lab, caller: Caller, asked: Submission) -> TrainingJob:
    """Check a run as `mettle rl run` does, and queue it for the caller or a team of theirs.

    Raises: HttpError 403 for a team that is not theirs, 409 for an environment whose card has failed, 422 for what is
    not offered, 429 for too many that wait.
    """
    owner_id = owner_of(caller, asked.team_id)
    config = run_config(asked, offered_models(lab.models))
    names = [each.id for each in asked.environments]
    with lab.database.write() as c:
        must_have_passed(c, caller, names, is_overridden=asked.override_card)
        job = jobs.submit(
            c, caller, owner_id, name=asked.name or f"{names[0]} {asked.model}", model=asked.model,
            environments=names, config=config,
        )  # fmt: skip
        audit.note(c, caller.name, "run.submit", job.name, address=caller.address)
        return job
