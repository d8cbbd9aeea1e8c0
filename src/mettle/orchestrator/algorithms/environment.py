"""Environment: the advantages are those that the environment itself gave, as they stand.

A_it is the advantage of turn t of rollout i, or that of the rollout where the turn has none. It is the algorithm of
every environment that says `provides_advantages`, unless its own table names another.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mettle.errors import UserError
from mettle.orchestrator.algorithms import Algorithm
from mettle.records.tasks import Credit, GroupRecord, RolloutRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class EnvironmentAdvantages(Algorithm):
    """Takes the environment at its word."""

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        """Raises: UserError for a rollout with a reward and no advantage."""
        scored = group.rewards
        mean = math.fsum(scored) / len(scored) if scored else 0.0
        return [None if r.reward is None else self._credit(r, r.reward - mean, group) for r in group.rollouts]

    def _credit(self, rollout: RolloutRecord, inherited: float, group: GroupRecord) -> Credit:
        # Scoring gives a step without an advantage that of the reward, which says nothing of the environment's own.
        own = [turn.advantage for turn in rollout.turns]
        if rollout.advantage is not None and all(a is None or math.isclose(a, inherited) for a in own):
            return {"advantages": rollout.advantage}
        found = [rollout.advantage if advantage is None else advantage for advantage in own]
        if any(advantage is None for advantage in found):
            raise UserError(f"environment {group.draw.env_id!r} gave a rollout a reward and no advantage")
        return {"advantages": [advantage for advantage in found if advantage is not None]}
