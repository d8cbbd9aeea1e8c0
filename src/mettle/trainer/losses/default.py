"""The default: a token whose probability moved too far in the direction that its advantage asks for is held back.

surrogate = keep A r, with keep unless D > mask_high (A > 0) or D < -mask_low (A <= 0), where D = exp(l) - exp(m). The
trust region is in probability, not in ratio, so that unlikely tokens stay free to become likely. Source: DPPO with
binary total variation, arXiv 2602.04879; the squared log-ratio beside it, arXiv 2602.02276.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mettle.trainer.losses import PolicyLoss, SeenByLoss

if TYPE_CHECKING:
    from torch import Tensor


class DefaultLoss(PolicyLoss):
    """Holds tokens back whose probability moved too far."""

    type: Literal["default"] = "default"
    mask_high: float = Field(default=0.2, gt=0)
    """Drop a token with positive advantage whose probability rose by more than this."""

    def surrogate(self, seen: SeenByLoss) -> tuple[Tensor, Tensor]:
        advantages_K, moved_K = seen.columns.advantages, seen.moved_K
        is_masked_K = (moved_K > self.mask_high).where(advantages_K > 0, moved_K < -self.mask_low)
        return (seen.log_ratio_K.exp() * advantages_K).masked_fill(is_masked_K, 0.0), is_masked_K
