"""Hierarchical GRPO: each agent's rollouts are compared with that agent's own, in the group or in one episode of it.

A_i = r_i - mean of the rollouts of the same agent in the group; for the agents in `episode_agents`, of the same agent
in the same episode. Agent and episode are what a rollout's `info` says under `agent_key` and `episode_key`; a rollout
that names none is of one common agent, so where nothing is named it is GRPO. A rollout without siblings has A = 0.
Source: the multi-agent credit that prime-rl calls by this name; for a group of one agent GRPO, arXiv 2402.03300.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.credit import label_of, per_rollout
from mettle.records.tasks import Credit, GroupRecord, RolloutRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class HierarchicalGRPO(Algorithm):
    """Reward minus the mean of the same agent's rollouts."""

    min_group_size = 2

    def __init__(
        self,
        *,
        agent_key: str = "agent",
        episode_key: str = "episode",
        episode_agents: Sequence[str] = (),
        scale_by_std: bool = False,
    ) -> None:
        self._agent_key, self._episode_key = agent_key, episode_key
        self._episode_agents = frozenset(episode_agents)
        self._scale_by_std = scale_by_std

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        """Raises: ValueError when an agent is to be compared within episodes that its rollouts don't name."""
        families: dict[tuple[str, str], list[int]] = {}
        for i, rollout in enumerate(group.rollouts):
            families.setdefault(self._family(rollout), []).append(i)
        found: list[float | None] = [None] * len(group.rollouts)
        for members in families.values():
            rewards = [group.rollouts[i].reward for i in members]
            for i, advantage in zip(members, group_advantages(rewards, scale_by_std=self._scale_by_std), strict=True):
                found[i] = advantage
        return per_rollout(found)

    def _family(self, rollout: RolloutRecord) -> tuple[str, str]:
        agent = label_of(rollout, self._agent_key)
        if agent not in self._episode_agents:
            return agent, ""
        episode = label_of(rollout, self._episode_key)
        if not episode and rollout.reward is not None:
            raise ValueError(
                f"agent {agent!r} is one of episode_agents, but the info of rollout {rollout.rollout_id} has no "
                f"{self._episode_key!r}"
            )
        return agent, episode
