"""PPO's clipped surrogate, a token at a time.

surrogate = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). Source: PPO, arXiv 1707.06347; with two different bounds
it is the clip-higher of DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mettle.trainer.losses import PolicyLoss, SeenByLoss

if TYPE_CHECKING:
    from torch import Tensor


class PpoClipLoss(PolicyLoss):
    """Clips the ratio of each token."""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio counts down to 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio counts up to 1 + clip_high."""

    def surrogate(self, seen: SeenByLoss) -> tuple[Tensor, Tensor]:
        advantages_K, ratio_K = seen.columns.advantages, seen.log_ratio_K.exp()
        gain_K = ratio_K * advantages_K
        clipped_K = ratio_K.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages_K
        return gain_K.minimum(clipped_K), clipped_K < gain_K
