"""RAE: reward minus a running mean of the environment's rewards, or of the agent's where several play.

A = r - b, then b <- decay * b + (1 - decay) * r, with b = 0 at first and one baseline an environment, and in it one an
agent where the rollouts' `info` names one under `agent_key` (the seats of a game differ in what they can win). It needs
no siblings, so groups may have one rollout. Source: role-conditioned advantage estimation of SPIRAL, arXiv 2506.24119.
The baselines are state: they are stored with every scored group and survive a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.credit import label_of, per_rollout
from mettle.records.tasks import Credit, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class RAE(Algorithm):
    """Reward minus an exponential moving average, kept by environment and agent."""

    def __init__(self, *, decay: float = 0.95, agent_key: str = "agent") -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be in [0, 1), not {decay}")
        self._decay = decay
        self._agent_key = agent_key
        self._baselines: dict[str, float] = {}

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        """Each reward is compared with the baseline before it moves; an errored rollout moves nothing."""
        found: list[float | None] = []
        for rollout in group.rollouts:
            if rollout.reward is None:
                found.append(None)
                continue
            agent = label_of(rollout, self._agent_key)
            key = f"{group.draw.env_id}/{agent}" if agent else group.draw.env_id
            baseline = self._baselines.get(key, 0.0)
            found.append(rollout.reward - baseline)
            self._baselines[key] = self._decay * baseline + (1.0 - self._decay) * rollout.reward
        return per_rollout(found)

    def state(self) -> dict[str, Any]:
        """The baselines by environment, or environment/agent."""
        return {"baselines": dict(self._baselines)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the baselines."""
        self._baselines = {str(env_id): float(value) for env_id, value in state.get("baselines", {}).items()}
