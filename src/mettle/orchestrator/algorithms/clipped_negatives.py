"""Clipped negatives: what is better than the mean of the group is made likelier, and nothing is made less likely.

A_i = max(r_i - mean(r), floor), with floor 0 unless another is given (at most 0). A gradient that only pulls cannot run
away as one that pushes can, which is worth most when rollouts are stale. Source: the option `neg_clipped` of
INTELLECT-2, arXiv 2505.07291.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.credit import per_rollout, rewards_of
from mettle.records.tasks import Credit, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class ClippedNegatives(Algorithm):
    """Reward minus the group mean, but no less than `floor`."""

    min_group_size = 2

    def __init__(self, *, floor: float = 0.0, scale_by_std: bool = False) -> None:
        if floor > 0:
            raise ValueError(f"floor must be at most 0, not {floor}")
        self._floor = floor
        self._scale_by_std = scale_by_std

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        found = group_advantages(rewards_of(group), scale_by_std=self._scale_by_std)
        return per_rollout(None if advantage is None else max(advantage, self._floor) for advantage in found)
