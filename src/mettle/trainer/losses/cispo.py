"""CISPO: the ratio is clipped as a weight, so that every token keeps a gradient.

surrogate = sg(clip(r, 1 - clip_low, 1 + clip_high)) A l. Source: CISPO of MiniMax-M1, arXiv 2506.13585, which leaves
the lower bound open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mettle.trainer.losses import PolicyLoss, SeenByLoss
from mettle.trainer.losses.surrogates import weighted_logprob

if TYPE_CHECKING:
    from torch import Tensor


class CispoLoss(PolicyLoss):
    """Clips the weight of each token, not its gradient."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """The weight counts down to 1 - clip_low; 1 leaves it open."""
    clip_high: float = Field(default=0.2, gt=0)
    """The weight counts up to 1 + clip_high."""

    def surrogate(self, seen: SeenByLoss) -> tuple[Tensor, Tensor]:
        ratio_K = seen.log_ratio_K.detach().exp()
        weight_K = ratio_K.clamp(1 - self.clip_low, 1 + self.clip_high)
        return weighted_logprob(weight_K, seen.columns.advantages, seen.logprobs_K), weight_K != ratio_K
