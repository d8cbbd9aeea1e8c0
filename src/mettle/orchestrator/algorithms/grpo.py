"""GRPO: reward minus the mean of the group.

A_i = r_i - mean(r), over the rollouts that have a reward. Source: GRPO, arXiv 2402.03300; without the division by the
standard deviation (the default) it is Dr. GRPO, arXiv 2503.20783, which does not favour groups of little spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

EQUAL_WITHIN = 1e-6
"""Rewards that agree to within this are equal: float noise must not become a gradient."""


class GRPO:
    """Reward minus the group mean; `scale_by_std` divides by the group's standard deviation."""

    min_group_size = 2

    def __init__(self, *, scale_by_std: bool = False) -> None:
        self._scale_by_std = scale_by_std

    def advantages(self, env_id: str, rewards: Sequence[float | None]) -> list[float | None]:
        """None marks an errored rollout: it gets None back and does not shift its siblings' baseline."""
        return group_advantages(rewards, scale_by_std=self._scale_by_std)

    def state(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to take up."""


def group_advantages(rewards: Sequence[float | None], *, scale_by_std: bool = False) -> list[float | None]:
    """Reward minus the mean of those that have one; exact zeros when all are equal to within `EQUAL_WITHIN`."""
    scored = [reward for reward in rewards if reward is not None]
    if not scored or max(scored) - min(scored) <= EQUAL_WITHIN:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / len(scored))
    scale = std if scale_by_std else 1.0
    return [None if reward is None else (reward - mean) / scale for reward in rewards]
