"""Distillation: the policy samples, and at each place is fitted to a teacher's whole distribution, not to one token.

Every sampled token has distill weight `weight`. With `top_k` the model called `teacher` among the run's services says
which k tokens it would likeliest have put in each place and how likely they are; all others count as one outcome more.
Without it nothing is asked here: the trainer holds the teacher (`[trainer.distillation] teacher`) and compares the
whole vocabulary, which costs a forward pass of it a step. `[trainer.distillation]` says which divergence is minimised.
Rewards count besides when `reward_weight` is not 0: A = reward_weight (r - mean r), as in GRPO. Source: GKD, arXiv
2306.13649.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.credit import rewards_of
from mettle.orchestrator.samples import sampled_alternatives
from mettle.records.tasks import Credit, CreditValue, GroupRecord, RolloutRecord
from mettle.records.tokens import IntArray

if TYPE_CHECKING:
    from mettle.orchestrator.services import ScoringModel, Services


class Distillation(Algorithm):
    """Fits the policy to a teacher's distribution over the whole vocabulary, or over its `top_k` likeliest tokens."""

    def __init__(
        self,
        *,
        teacher: str = "teacher",
        top_k: int | None = None,
        weight: float = 1.0,
        reward_weight: float = 0.0,
    ) -> None:
        if top_k is not None and not 1 <= top_k <= MAX_LISTED:
            raise ValueError(f"top_k must be 1 to {MAX_LISTED}, as endpoints list no more, not {top_k}")
        if weight <= 0:
            raise ValueError(f"weight must be above 0, not {weight}: without it, take grpo")
        self.needs = () if top_k is None else (teacher,)
        self.teaches = "whole" if top_k is None else "listed"
        self._top_k = top_k
        self._weight = weight
        self._reward_weight = reward_weight

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
        told: list[Credit] = [{} for _ in scored]
        if self._top_k is not None:
            model, number = services.model(self.needs[0]), self._top_k
            told = list(await asyncio.gather(*(listed_for(rollout, model, number) for rollout in scored)))
        by_id = dict(zip([rollout.rollout_id for rollout in scored], told, strict=True))
        found: list[Credit | None] = []
        for rollout, advantage in zip(group.rollouts, group_advantages(rewards_of(group)), strict=True):
            if advantage is None:
                found.append(None)
                continue
            credit: dict[str, CreditValue] = {"distill_weights": self._weight, **by_id[rollout.rollout_id]}
            if self._reward_weight:
                credit["advantages"] = self._reward_weight * advantage
            found.append(credit)
        return found


MAX_LISTED = 20
"""The most that Mettle's engine and vLLM's default tell of a place."""


async def listed_for(
    rollout: RolloutRecord, model: ScoringModel, number: int, before: IntArray | None = None
) -> Credit:
    """The columns of what a model lists in each sampled token's place, told `before` ahead of everything."""
    found = await sampled_alternatives(rollout.turns, model, number, before)
    # Credit is float32 throughout, which holds every id below 2^24.
    ids = [ids.astype(np.float32) for ids, _ in found]
    return {"teacher_ids": ids, "teacher_logprobs": [logprobs for _, logprobs in found]}
