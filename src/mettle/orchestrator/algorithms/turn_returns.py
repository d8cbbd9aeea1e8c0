"""Turn returns: what came after a turn, minus what came after the same turn of its siblings.

G_it = sum over s >= t of discount^(s - t) r_is, with r_is the reward that the environment gave turn s of rollout i, and
A_it = G_it - mean over the rollouts j that have a turn t of G_jt. A rollout whose turns have no rewards of their own
has its reward at its last turn. A turn that only one rollout reached has nothing to be compared with: A = 0. With
rewards at the end alone, no discount and equally many turns it is GRPO. Source: turn-level credit, arXiv 2505.11821.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.records.tasks import Credit, GroupRecord, RolloutRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class TurnReturns(Algorithm):
    """Each turn is credited with what followed it."""

    min_group_size = 2

    def __init__(self, *, discount: float = 1.0) -> None:
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"discount must be in [0, 1], not {discount}")
        self._discount = discount

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        returns = [None if r.reward is None else discounted_returns(r, self._discount) for r in group.rollouts]
        most = max((len(values) for values in returns if values is not None), default=0)
        by_turn = [
            group_advantages([None if values is None or t >= len(values) else values[t] for values in returns])
            for t in range(most)
        ]
        return [
            None if values is None else {"advantages": [by_turn[t][i] or 0.0 for t in range(len(values))]}
            for i, values in enumerate(returns)
        ]


def discounted_returns(rollout: RolloutRecord, discount: float) -> list[float]:
    """For each turn what it and those after it were given, each later one discounted once more.

    A rollout whose turns have no rewards of their own has its reward at its last turn.
    """
    rewards = [turn.reward or 0.0 for turn in rollout.turns]
    if rewards and all(turn.reward is None for turn in rollout.turns):
        rewards[-1] = rollout.reward or 0.0
    following, found = 0.0, []
    for reward in reversed(rewards):
        following = reward + discount * following
        found.append(following)
    return found[::-1]
