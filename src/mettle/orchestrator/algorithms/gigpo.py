"""GiGPO: the whole rollout is compared with its siblings, and each step with those taken from the same state.

A_it = (r_i - mean_j r_j) + step_weight (G_it - mean of G over the group's turns that were taken from the same state),
with G_it = sum over s >= t of discount^(s - t) r_is. Two turns have the same state when what they saw is the same: all
the tokens before them (`anchor = "context"`), or those that the environment added last (`"observation"`, right where
an observation tells the whole state). A state that was met once adds nothing. `scale_by_std` divides each difference by
its own standard deviation. Source: group-in-group policy optimization, arXiv 2505.10978.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.algorithms.turn_returns import discounted_returns
from mettle.orchestrator.credit import rewards_of
from mettle.orchestrator.samples import contexts_of
from mettle.records.tasks import Credit, GroupRecord, RolloutRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services

ANCHORS = ("context", "observation")


class GiGPO(Algorithm):
    """Credit of episodes and of steps from the same state."""

    min_group_size = 2

    def __init__(
        self,
        *,
        step_weight: float = 1.0,
        discount: float = 0.95,
        anchor: str = "context",
        scale_by_std: bool = False,
    ) -> None:
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"discount must be in [0, 1], not {discount}")
        if anchor not in ANCHORS:
            raise ValueError(f"anchor must be one of {', '.join(ANCHORS)}, not {anchor!r}")
        self._step_weight, self._discount, self._anchor = step_weight, discount, anchor
        self._scale_by_std = scale_by_std

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        outcomes = group_advantages(rewards_of(group), scale_by_std=self._scale_by_std)
        steps: list[list[float]] = [[0.0] * len(rollout.turns) for rollout in group.rollouts]
        for family in self._families(group):
            returns = [value for _, _, value in family]
            for (i, t, _), advantage in zip(
                family, group_advantages(returns, scale_by_std=self._scale_by_std), strict=True
            ):
                steps[i][t] = self._step_weight * (advantage or 0.0)
        return [
            None if outcome is None else {"advantages": [outcome + step for step in steps[i]]}
            for i, outcome in enumerate(outcomes)
        ]

    def _families(self, group: GroupRecord) -> list[list[tuple[int, int, float]]]:
        """Turns from the same state, each as (rollout, turn, return)."""
        found: dict[bytes, list[tuple[int, int, float]]] = {}
        for i, rollout in enumerate(group.rollouts):
            if rollout.reward is None:
                continue
            returns = discounted_returns(rollout, self._discount)
            for t, (state, value) in enumerate(zip(self._states(rollout), returns, strict=True)):
                found.setdefault(state, []).append((i, t, value))
        return list(found.values())

    def _states(self, rollout: RolloutRecord) -> list[bytes]:
        if self._anchor == "observation":
            return [turn.new_prompt_ids.tobytes() for turn in rollout.turns]
        return [context.tobytes() for context in contexts_of(rollout.turns)]
