"""GRPO: reward minus the mean of the group.

A_i = r_i - mean(r), over the rollouts that have a reward. Source: GRPO, arXiv 2402.03300; without the division by the
standard deviation (the default) it is Dr. GRPO, arXiv 2503.20783, which does not favour groups of little spread.

With `length_penalty` what is compared is s_i = r_i - mean(r) (a out_i / max out + b in_i / max in + c turns_i / max
turns), out being a rollout's sampled tokens, in its other tokens, and a maximum at least 1: of rollouts that are right,
the shorter ones are preferred, the more so the more of the group is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mettle.evals.estimator import mean_of
from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.credit import are_equal, mean_and_deviation, per_rollout, rewards_of
from mettle.records.tasks import Credit, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services

PENALISED = ("output", "input", "turns")


class GRPO(Algorithm):
    """Reward minus the group mean; `scale_by_std` divides by the group's standard deviation.

    `length_penalty` has a weight for any of output, input and turns (.25, .1 and .1 are usual).
    """

    min_group_size = 2

    def __init__(self, *, scale_by_std: bool = False, length_penalty: Mapping[str, float] | None = None) -> None:
        self._scale_by_std = scale_by_std
        self._length_penalty = length_penalty or {}
        unknown = sorted(self._length_penalty.keys() - set(PENALISED))
        if unknown:
            raise ValueError(f"length_penalty has weights for {', '.join(PENALISED)}, not for {unknown[0]!r}")

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        rewards = length_penalised(group, self._length_penalty) if self._length_penalty else rewards_of(group)
        return per_rollout(group_advantages(rewards, scale_by_std=self._scale_by_std))


def group_advantages(rewards: Sequence[float | None], *, scale_by_std: bool = False) -> list[float | None]:
    """Reward minus the mean of those that have one; exact zeros when all are equal to within `EQUAL_WITHIN`."""
    scored = [reward for reward in rewards if reward is not None]
    if are_equal(scored):
        return [None if reward is None else 0.0 for reward in rewards]
    mean, std = mean_and_deviation(scored)
    scale = std if scale_by_std else 1.0
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def length_penalised(group: GroupRecord, weights: Mapping[str, float]) -> list[float | None]:
    """The rewards, less a share of their mean that grows with each rollout's length."""
    scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
    if not scored:
        return rewards_of(group)
    lengths = {
        "output": [rollout.num_completion_tokens for rollout in scored],
        "input": [sum(len(turn.new_prompt_ids) for turn in rollout.turns) for rollout in scored],
        "turns": [len(rollout.turns) for rollout in scored],
    }
    mean = mean_of(group.rewards)
    penalties = iter(
        mean * sum(weight * lengths[name][i] / max(1, *lengths[name]) for name, weight in weights.items())
        for i in range(len(scored))
    )
    return [None if rollout.reward is None else rollout.reward - next(penalties) for rollout in group.rollouts]
