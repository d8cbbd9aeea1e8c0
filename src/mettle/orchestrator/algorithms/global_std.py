"""Global standard deviation: reward minus the mean of the group, over the spread of all rewards of the environment.

A_i = (r_i - mean(r)) / std, with std over the rewards of this and earlier groups of the environment (a running one: a
reward counts `decay` times what the next does). Where GRPO's own std makes much of a group that hardly differs, this
one gives every group the same scale. Source: the batch-level std of REINFORCE++, arXiv 2501.03262, and of Lite PPO,
arXiv 2508.08221. The moments are state: they are stored with every scored group and survive a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.algorithms.running import RunningMoments
from mettle.orchestrator.credit import EQUAL_WITHIN, per_rollout, rewards_of
from mettle.records.tasks import Credit, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class GlobalStd(Algorithm):
    """Reward minus the group mean, over the running standard deviation of the environment's rewards."""

    min_group_size = 2

    def __init__(self, *, decay: float = 0.999) -> None:
        self._moments = RunningMoments(decay)

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        _, std = self._moments.observe(group.draw.env_id, group.rewards)
        scale = std if std > EQUAL_WITHIN else 1.0
        found = group_advantages(rewards_of(group))
        return per_rollout(None if advantage is None else advantage / scale for advantage in found)

    def state(self) -> dict[str, Any]:
        """The moments by environment."""
        return self._moments.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the moments."""
        self._moments.restore(state)
