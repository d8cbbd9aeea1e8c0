"""ECHO: GRPO on what the policy said, and imitation of what it was told in answer.

A_i as in GRPO on sampled tokens; the tokens that the environment added after the first turn (answers of tools and
opponents, with what the chat template puts around them) have cross-entropy weight `weight`, so the policy learns to
foresee what its actions lead to. Groups of equal rewards still train that, unless `only_with_signal`. Source: the
algorithm that prime-rl calls echo, whose weight is .1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.credit import rewards_of
from mettle.records.tasks import Credit, GroupRecord, RolloutRecord
from mettle.records.tokens import FloatArray

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class ECHO(Algorithm):
    """GRPO, and cross-entropy on observations."""

    min_group_size = 2

    def __init__(self, *, weight: float = 0.1, scale_by_std: bool = False, only_with_signal: bool = False) -> None:
        if weight <= 0:
            raise ValueError(f"weight must be above 0, not {weight}: without it, take grpo")
        self._weight = weight
        self._scale_by_std = scale_by_std
        self._only_with_signal = only_with_signal

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        found = group_advantages(rewards_of(group), scale_by_std=self._scale_by_std)
        is_silent = self._only_with_signal and not any(found)
        weight = 0.0 if is_silent else self._weight
        return [
            None if advantage is None else {"advantages": advantage, "ce_weights": _observed(rollout, weight)}
            for advantage, rollout in zip(found, group.rollouts, strict=True)
        ]


def _observed(rollout: RolloutRecord, weight: float) -> list[float | FloatArray]:
    """The weight on what each turn but the first adds to the prompt, and 0 on what was sampled."""
    return [
        0.0
        if number == 0
        else np.repeat(np.array([weight, 0.0], np.float32), [len(turn.new_prompt_ids), len(turn.completion_ids)])
        for number, turn in enumerate(rollout.turns)
    ]
