"""RAE: reward minus a running mean of the environment's rewards.

A = r - b, then b <- decay * b + (1 - decay) * r, with b = 0 at first and one baseline an environment. It needs no
siblings, so groups may have one rollout. Source: role-conditioned advantage estimation of SPIRAL, arXiv 2506.24119.
The baselines are state: they are stored with every scored group and survive a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.credit import per_rollout, rewards_of
from mettle.records.tasks import Credit, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class RAE(Algorithm):
    """Reward minus an exponential moving average, kept by environment."""

    def __init__(self, *, decay: float = 0.95) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be in [0, 1), not {decay}")
        self._decay = decay
        self._baselines: dict[str, float] = {}

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        """Each reward is compared with the baseline before it moves; an errored rollout moves nothing."""
        baseline = self._baselines.get(group.draw.env_id, 0.0)
        found: list[float | None] = []
        for reward in rewards_of(group):
            if reward is None:
                found.append(None)
                continue
            found.append(reward - baseline)
            baseline = self._decay * baseline + (1.0 - self._decay) * reward
        self._baselines[group.draw.env_id] = baseline
        return per_rollout(found)

    def state(self) -> dict[str, Any]:
        """The baselines by environment."""
        return {"baselines": dict(self._baselines)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the baselines."""
        self._baselines = {str(env_id): float(value) for env_id, value in state.get("baselines", {}).items()}
