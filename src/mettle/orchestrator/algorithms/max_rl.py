"""MaxRL: reward minus the mean of the group, divided by that mean.

A_i = (r_i - mean(r)) / mean(r), and 0 when mean(r) <= 0. For rewards of 0 and 1 this is the gradient of the likelihood
of success where GRPO's is that of its probability, so rare successes count for more. Source: arXiv 2602.02710.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.credit import are_equal, per_rollout, rewards_of
from mettle.records.tasks import Credit, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class MaxRL(Algorithm):
    """Relative distance to the group mean. Meant for rewards that are not negative."""

    min_group_size = 2

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        """Exact zeros when all rewards are equal or their mean is not positive."""
        rewards, scored = rewards_of(group), group.rewards
        mean = math.fsum(scored) / len(scored) if scored else 0.0
        if mean <= 0.0 or are_equal(scored):
            return per_rollout(None if reward is None else 0.0 for reward in rewards)
        return per_rollout(None if reward is None else (reward - mean) / mean for reward in rewards)
