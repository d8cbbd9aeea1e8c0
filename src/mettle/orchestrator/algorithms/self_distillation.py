"""Self-distillation: the policy is its own teacher, told something that it did not know when it sampled.

The teacher is the policy of the moment (or any service, an older version say), asked about the same sampled tokens with
one message of `role` ahead of the conversation: `template`, in which {hint} is the task's answer (`hint = "answer"`),
what the rollout's `info` says under another name (a hint, a solution, feedback of the environment), or the last answer
of the group's best rollout (`hint = "best"`, for those that earned less). With `top_k` the policy is fitted to the
teacher's k likeliest tokens, as in `distillation`; without, every sampled token has the teacher's logprob and ref_kl
weight `weight`, as in `reference_kl`. A rollout without a hint has no teacher, and trains by its reward if at all:
A = reward_weight (r - mean r). Sources: on-policy self-distillation, arXiv 2601.18734; feedback as the privileged
context, arXiv 2601.20802; context distillation, arXiv 2209.15189.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.distillation import MAX_LISTED, listed_for
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.credit import label_of, rewards_of
from mettle.orchestrator.samples import sampled_logprobs
from mettle.records.tasks import Credit, CreditValue, GroupRecord, RolloutRecord, content_of
from mettle.records.versions import POLICY

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services

ANSWER, BEST = "answer", "best"


class SelfDistillation(Algorithm):
    """Pulls the policy towards what it would have said had it known."""

    def __init__(
        self,
        *,
        hint: str = ANSWER,
        template: str = "The answer is: {hint}",
        role: str = "system",
        teacher: str = POLICY,
        top_k: int | None = None,
        weight: float = 1.0,
        reward_weight: float = 0.0,
    ) -> None:
        if "{hint}" not in template:
            raise ValueError(f"template must have {{hint}} in it, or the teacher knows nothing more; not {template!r}")
        if top_k is not None and not 1 <= top_k <= MAX_LISTED:
            raise ValueError(f"top_k must be 1 to {MAX_LISTED}, as endpoints list no more, not {top_k}")
        if weight <= 0:
            raise ValueError(f"weight must be above 0, not {weight}: without it, take grpo")
        self.needs = (teacher,)
        self.teaches = "" if top_k is None else "listed"
        self.min_group_size = 2 if hint == BEST else 1
        self._hint, self._template, self._role = hint, template, role
        self._top_k, self._weight, self._reward_weight = top_k, weight, reward_weight

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        told = await asyncio.gather(*(self._taught(rollout, group, services) for rollout in group.rollouts))
        found: list[Credit | None] = []
        for credit, advantage in zip(told, group_advantages(rewards_of(group)), strict=True):
            if advantage is None:
                found.append(None)
            elif self._reward_weight:
                found.append({**credit, "advantages": self._reward_weight * advantage})
            else:
                found.append(credit)
        return found

    async def _taught(self, rollout: RolloutRecord, group: GroupRecord, services: Services) -> Credit:
        """What the teacher makes of a rollout; nothing where it has no more to go by than the rollout had."""
        hint = "" if rollout.reward is None else self._hint_for(rollout, group)
        if not hint:
            return {}
        before = services.render([{"role": self._role, "content": self._template.replace("{hint}", hint)}])
        model = services.model(self.needs[0])
        if self._top_k is not None:
            listed = await listed_for(rollout, model, self._top_k, before)
            return {"distill_weights": self._weight, **listed}
        logprobs: CreditValue = await sampled_logprobs(rollout.turns, model, before)
        return {"ref_kl_weights": self._weight, "ref_logprobs": logprobs}

    def _hint_for(self, rollout: RolloutRecord, group: GroupRecord) -> str:
        if self._hint == ANSWER:
            return str(rollout.answer or "")
        if self._hint != BEST:
            return label_of(rollout, self._hint)
        best = max((r for r in group.rollouts if r.reward is not None), key=lambda r: r.reward or 0.0)
        is_better = (best.reward or 0.0) > (rollout.reward or 0.0)
        said = [message for message in best.completion if message.get("role") == "assistant"]
        return content_of(said[-1]) if is_better and said else ""
