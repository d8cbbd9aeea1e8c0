"""OPO: reward minus a mean in which a rollout counts by its length.

A_i = r_i - sum_j(l_j r_j) / sum_j(l_j), with l_j the sampled tokens of rollout j: the baseline of least variance when
the gradient of a rollout grows with its length. Source: on-policy RL with the optimal reward baseline, arXiv
2505.23585.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.credit import are_equal, per_rollout, rewards_of
from mettle.records.tasks import Credit, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class OPO(Algorithm):
    """Reward minus the length-weighted mean of the group."""

    min_group_size = 2

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        rewards = rewards_of(group)
        if are_equal(group.rewards):
            return per_rollout(None if reward is None else 0.0 for reward in rewards)
        weighted = [(r.reward, max(1, r.num_completion_tokens)) for r in group.rollouts if r.reward is not None]
        baseline = math.fsum(reward * length for reward, length in weighted) / sum(length for _, length in weighted)
        return per_rollout(None if reward is None else reward - baseline for reward in rewards)
