"""GRPO: reward minus the mean of the group.

A_i = r_i - mean(r), over the rollouts that have a reward. Source: GRPO, arXiv 2402.03300; without the division by the
standard deviation (the default) it is Dr. GRPO, arXiv 2503.20783, which does not favour groups of little spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.credit import per_rollout, rewards_of
from mettle.records.tasks import Credit, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services

EQUAL_WITHIN = 1e-6
"""Rewards that agree to within this are equal: float noise must not become a gradient."""


class GRPO(Algorithm):
    """Reward minus the group mean; `scale_by_std` divides by the group's standard deviation."""

    min_group_size = 2

    def __init__(self, *, scale_by_std: bool = False) -> None:
        self._scale_by_std = scale_by_std

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        return per_rollout(group_advantages(rewards_of(group), scale_by_std=self._scale_by_std))


def group_advantages(rewards: Sequence[float | None], *, scale_by_std: bool = False) -> list[float | None]:
    """Reward minus the mean of those that have one; exact zeros when all are equal to within `EQUAL_WITHIN`."""
    scored = [reward for reward in rewards if reward is not None]
    if not scored or max(scored) - min(scored) <= EQUAL_WITHIN:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / len(scored))
    scale = std if scale_by_std else 1.0
    return [None if reward is None else (reward - mean) / scale for reward in rewards]
