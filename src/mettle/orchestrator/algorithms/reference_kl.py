"""Reference KL: the policy samples, and a frozen model says how likely it would have been (on-policy distillation).

Every sampled token has ref_kl weight `weight` and the frozen model's logprob of it; the trainer's ref_kl component then
follows the policy gradient of -KL(policy || reference), estimated at the sampled tokens. Rewards count besides when
`reward_weight` is not 0: A = reward_weight (r - mean r), as in GRPO. Sources: GKD, arXiv 2306.13649 (distillation on
what the student samples); the component in docs/explanation/training.md.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.credit import rewards_of
from mettle.orchestrator.samples import sampled_logprobs
from mettle.records.tasks import Credit, CreditValue, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class ReferenceKL(Algorithm):
    """Pulls the policy towards the model called `reference` among the run's services."""

    def __init__(self, *, reference: str = "reference", weight: float = 1.0, reward_weight: float = 0.0) -> None:
        if weight <= 0:
            raise ValueError(f"weight must be above 0, not {weight}: without it, take grpo")
        self.needs = (reference,)
        self._weight = weight
        self._reward_weight = reward_weight

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        model = services.model(self.needs[0])
        scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
        logprobs = dict(
            zip(
                [rollout.rollout_id for rollout in scored],
                await asyncio.gather(*(sampled_logprobs(rollout.turns, model) for rollout in scored)),
                strict=True,
            )
        )
        found: list[Credit | None] = []
        for rollout, advantage in zip(group.rollouts, group_advantages(rewards_of(group)), strict=True):
            if advantage is None:
                found.append(None)
                continue
            credit: dict[str, CreditValue] = {"ref_kl_weights": self._weight}
            credit["ref_logprobs"] = logprobs[rollout.rollout_id]
            if self._reward_weight:
                credit["advantages"] = self._reward_weight * advantage
            found.append(credit)
        return found
