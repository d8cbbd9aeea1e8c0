"""PPO's clipped surrogate, a token at a time or a sequence at a time.

surrogate = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). Under `level = "sequence"` r is the product of the ratios
of the sequence's members (its value; the gradient is that of each token's own l), under `"geometric"` their geometric
mean, which is `gspo` with PPO's bounds. Source: PPO, arXiv 1707.06347; with two different bounds it is the clip-higher
of DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mettle.trainer.losses import Level, PolicyLoss, SeenByLoss
from mettle.trainer.losses.surrogates import as_token_ratio, clipped_gain

if TYPE_CHECKING:
    from torch import Tensor


class PpoClipLoss(PolicyLoss):
    """Clips the ratio of each token, or of each sequence."""

    type: Literal["ppo_clip"] = "ppo_clip"
    level: Level = "token"
    """Whose ratio is clipped: the token's, the sequence's (the product), or the geometric mean over the sequence."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio counts down to 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio counts up to 1 + clip_high."""

    def surrogate(self, seen: SeenByLoss) -> tuple[Tensor, Tensor]:
        if self.level == "token":
            ratio_K = seen.log_ratio_K.exp()
        else:
            ratio_K = as_token_ratio(seen.log_ratio(self.level, self.log_ratio_clamp), seen.logprobs_K)
        return clipped_gain(ratio_K, seen.columns.advantages, 1 - self.clip_low, 1 + self.clip_high)
