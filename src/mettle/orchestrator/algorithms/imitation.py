"""Imitation: rollouts that are good enough are trained on as they stand.

Every sampled token of a rollout with r_i >= min_reward has cross-entropy weight `weight`, all others none; nothing is
compared, so groups may have one rollout. With `best_only` the best of those in the group alone is taken (the first of
equals). Sources: STaR, arXiv 2203.14465; RAFT, arXiv 2304.06767 (`best_only`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.records.tasks import Credit, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class Imitation(Algorithm):
    """Cross-entropy on what was rewarded."""

    def __init__(self, *, min_reward: float = 1.0, weight: float = 1.0, best_only: bool = False) -> None:
        if weight <= 0:
            raise ValueError(f"weight must be above 0, not {weight}: nothing would train")
        self._min_reward, self._weight, self._best_only = min_reward, weight, best_only

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        best = max(group.rewards, default=0.0)
        threshold = max(best, self._min_reward) if self._best_only else self._min_reward
        found: list[Credit | None] = []
        num_taken = 0
        for rollout in group.rollouts:
            if rollout.reward is None:
                found.append(None)
                continue
            is_taken = rollout.reward >= threshold and not (self._best_only and num_taken)
            num_taken += is_taken
            found.append({"ce_weights": self._weight if is_taken else 0.0})
        return found
