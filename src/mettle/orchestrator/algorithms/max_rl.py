"""MaxRL: reward minus the mean of the group, divided by that mean.

A_i = (r_i - mean(r)) / mean(r), and 0 when mean(r) <= 0. For rewards of 0 and 1 this is the gradient of the likelihood
of success where GRPO's is that of its probability, so rare successes count for more. Source: arXiv 2602.02710.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mettle.orchestrator.algorithms.grpo import EQUAL_WITHIN


class MaxRL:
    """Relative distance to the group mean. Meant for rewards that are not negative."""

    min_group_size = 2

    def advantages(self, env_id: str, rewards: Sequence[float | None]) -> list[float | None]:
        """None for an errored rollout; exact zeros when all rewards are equal or their mean is not positive."""
        scored = [reward for reward in rewards if reward is not None]
        mean = math.fsum(scored) / len(scored) if scored else 0.0
        if mean <= 0.0 or max(scored) - min(scored) <= EQUAL_WITHIN:
            return [None if reward is None else 0.0 for reward in rewards]
        return [None if reward is None else (reward - mean) / mean for reward in rewards]

    def state(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to take up."""
