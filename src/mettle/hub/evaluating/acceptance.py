"""From a hosted evaluation that is asked for to one in the queue, the same for programs and for the page."""

from __future__ import annotations

from mettle.hub.accounts import audit
from mettle.hub.actions.gate import must_have_passed
from mettle.hub.caller import Caller, owner_of
from mettle.hub.evaluating.submission import HostedEvaluation, order_for
from mettle.hub.lab import Lab
from mettle.hub.registry import catalogue
from mettle.hub.results import pushed
from mettle.hub.results.pushed import Described
from mettle.hub.training import jobs
from mettle.hub.training.jobs import TrainingJob
from mettle.hub.training.usage import must_have_room
from mettle.web.problems import HttpError


def accept_evaluation(lab: Lab, caller: Caller, asked: HostedEvaluation) -> TrainingJob:
    """Check it, and queue it for the caller or a team of theirs; its results have their place from then on.

    Raises: HttpError 403, 404, 409 and 422 as the parts say.
    """
    owner_id = owner_of(caller, asked.team_id)
    with lab.database.write() as c:
        environment_id, said = None, asked.environment
        if asked.environment_ids:
            known = catalogue.environment_by_id(c, caller, asked.environment_ids[0])
            environment_id, said = known.id, known.slug
        elif "/" in said:
            owner, _, project = said.partition("@")[0].partition("/")
            known = catalogue.find_environment(c, caller, owner, project)
            environment_id = known.id
        if not said:
            raise HttpError(422, "say which environment, with environment_ids or environment", param="environment")
        must_have_passed(c, caller, [said], is_overridden=asked.override_card)
        must_have_room(c, owner_id, 0)
        order = order_for(c, lab, caller, owner_id, asked, said)
        name = asked.name or f"{said} {asked.inference_model}"
        told = Described(
            name, said.partition("@")[0], environment_id, asked.inference_model, asked.is_public, "mettle",
            {"is_hosted": True}, {},
        )  # fmt: skip
        result = pushed.create_result(c, caller, owner_id, told)
        pushed.set_status(c, result.id, pushed.PENDING)
        job = jobs.submit(
            c, caller, owner_id, name=name, model=asked.inference_model, environments=[said],
            config=order.to_dict(), kind=jobs.EVAL, result_id=result.id,
        )  # fmt: skip
        audit.note(c, caller.name, "evaluation.submit", name, address=caller.address)
        return job
