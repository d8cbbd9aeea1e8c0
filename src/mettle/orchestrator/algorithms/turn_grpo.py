"""Turn-level GRPO: each turn is compared with the same turn of its siblings, and the whole with the whole.

A_it = turn_weight (r_it - mean_j r_jt) + outcome_weight (r_i - mean_j r_j), with r_it the reward that the environment
gave turn t of rollout i, over the rollouts that have one there, and r_i that of the rollout. `scale_by_std` divides
each difference by its own standard deviation. A turn without a reward of its own has the second part alone; so where
only the end is rewarded it is GRPO. Unlike `turn_returns` a turn is not credited with what later turns were given.
Source: MT-GRPO, arXiv 2505.11821.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.credit import rewards_of
from mettle.records.tasks import Credit, GroupRecord, RolloutRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class TurnGRPO(Algorithm):
    """Per-step rewards beside the outcome."""

    min_group_size = 2

    def __init__(self, *, turn_weight: float = 1.0, outcome_weight: float = 1.0, scale_by_std: bool = False) -> None:
        if not turn_weight and not outcome_weight:
            raise ValueError("turn_weight and outcome_weight are both 0, so every advantage is: raise one of them")
        self._turn_weight, self._outcome_weight = turn_weight, outcome_weight
        self._scale_by_std = scale_by_std

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        outcomes = group_advantages(rewards_of(group), scale_by_std=self._scale_by_std)
        most = max((len(rollout.turns) for rollout in group.rollouts), default=0)
        by_turn = [
            group_advantages([_turn_reward(r, t) for r in group.rollouts], scale_by_std=self._scale_by_std)
            for t in range(most)
        ]
        return [
            None
            if outcome is None
            else {
                "advantages": [
                    self._outcome_weight * outcome + self._turn_weight * (by_turn[t][i] or 0.0)
                    for t in range(len(rollout.turns))
                ]
            }
            for i, (outcome, rollout) in enumerate(zip(outcomes, group.rollouts, strict=True))
        ]


def _turn_reward(rollout: RolloutRecord, t: int) -> float | None:
    """None where the rollout failed, did not come so far, or was given nothing there."""
    return None if rollout.reward is None or t >= len(rollout.turns) else rollout.turns[t].reward
