"""DAPO: rewards that fall for rollouts that run long, over the standard deviation of the group.

A_i = (s_i - mean(s)) / std(s), with s_i = r_i + overlong_penalty c(l_i), l_i the sampled tokens of the rollout, and

    c(l) = 0 up to max_tokens - buffer_tokens, then (max_tokens - buffer_tokens - l) / buffer_tokens, and -1 from
    max_tokens on.

Without `max_tokens` s is r. Its other two parts are settings of the run: dynamic sampling is `filter_zero_advantages`
(a group whose rewards are equal before the shaping has no signal and is replaced), clip-higher is `[trainer.loss]
type = "ppo_clip", clip_low = .2, clip_high = .28`, and its mean over all tokens of a batch is the trainer's own.
Source: arXiv 2503.14476.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.credit import are_equal, per_rollout, rewards_of
from mettle.records.tasks import Credit, GroupRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class DAPO(Algorithm):
    """`max_tokens`: sampled tokens from which the whole penalty counts; it begins `buffer_tokens` before."""

    min_group_size = 2

    def __init__(
        self, *, max_tokens: int | None = None, buffer_tokens: int | None = None, overlong_penalty: float = 1.0
    ) -> None:
        if (max_tokens is None) != (buffer_tokens is None):
            raise ValueError("max_tokens and buffer_tokens shape the reward together: give both, or neither")
        if max_tokens is not None and buffer_tokens is not None and not 0 < buffer_tokens <= max_tokens:
            raise ValueError(f"buffer_tokens must be from 1 to max_tokens ({max_tokens}), not {buffer_tokens}")
        self._max_tokens, self._buffer_tokens = max_tokens or 0, buffer_tokens or 0
        self._overlong_penalty = overlong_penalty

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        rewards = rewards_of(group)
        if are_equal(group.rewards):
            return per_rollout(None if reward is None else 0.0 for reward in rewards)
        shaped = [
            None if reward is None else reward + self._overlong_penalty * self.overlong(rollout.num_completion_tokens)
            for reward, rollout in zip(rewards, group.rollouts, strict=True)
        ]
        return per_rollout(group_advantages(shaped, scale_by_std=True))

    def overlong(self, length: int) -> float:
        """From 0 to -1: how far a rollout of `length` sampled tokens is over what was asked for."""
        if not self._buffer_tokens:
            return 0.0
        return max(-1.0, min(0.0, (self._max_tokens - self._buffer_tokens - length) / self._buffer_tokens))
