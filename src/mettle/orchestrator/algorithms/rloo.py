"""RLOO: reward minus the mean of the other rollouts of the group.

A_i = r_i - mean over j != i of r_j = (r_i - mean(r)) n / (n - 1), with n rollouts that have a reward; 0 for a single
one. The baseline does not contain what it is compared with, so it biases nothing. Source: arXiv 2402.14740.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.credit import per_rollout, rewards_of
from mettle.records.tasks import Credit, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class RLOO(Algorithm):
    """Reward minus the mean of the others."""

    min_group_size = 2

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        others = max(1, len(group.rewards) - 1)
        scale = len(group.rewards) / others
        found = group_advantages(rewards_of(group))
        return per_rollout(None if advantage is None else advantage * scale for advantage in found)
