"""REINFORCE++: rewards are compared with those of all tasks, not with those of their group.

    reinforce_pp           A_i = (r_i - m) / std       m and std over the rewards of this and earlier groups
    reinforce_pp_baseline  A_i = (r_i - mean(r)) / std  the mean of the group, std over such differences

Both moments are running ones of the environment (a value counts `decay` times what the next does) and survive a
restart. The first needs no siblings, so groups may have one rollout; the penalty for leaving the sampler is the loss's
`kl_tau`. Without any spread so far A is 0. Source: arXiv 2501.03262.
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


class ReinforcePP(Algorithm):
    """Rewards normalised over all tasks of the environment."""

    def __init__(self, *, decay: float = 0.999) -> None:
        self._moments = RunningMoments(decay)

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        compared = self._compared(group)
        scored = [value for value in compared if value is not None]
        mean, std = self._moments.observe(group.draw.env_id, scored)
        if std <= EQUAL_WITHIN:
            return per_rollout(None if value is None else 0.0 for value in compared)
        return per_rollout(None if value is None else (value - self._centre(mean)) / std for value in compared)

    def _compared(self, group: GroupRecord) -> list[float | None]:
        return rewards_of(group)

    def _centre(self, mean: float) -> float:
        return mean

    def state(self) -> dict[str, Any]:
        """The moments by environment."""
        return self._moments.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the moments."""
        self._moments.restore(state)


class ReinforcePPBaseline(ReinforcePP):
    """Rewards less their group's mean, normalised over all tasks of the environment."""

    min_group_size = 2

    def _compared(self, group: GroupRecord) -> list[float | None]:
        return group_advantages(rewards_of(group))

    def _centre(self, mean: float) -> float:
        return 0.0  # the differences of a group have the mean 0 by themselves
