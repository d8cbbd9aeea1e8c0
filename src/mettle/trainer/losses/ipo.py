"""IPO: as the default, but a token is held back whichever way its probability moved.

surrogate = keep A r, with keep unless |D| > ipo_threshold, where D = exp(l) - exp(m).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mettle.trainer.losses import PolicyLoss, SeenByLoss

if TYPE_CHECKING:
    from torch import Tensor


class IpoLoss(PolicyLoss):
    """Holds tokens back whose probability moved too far either way."""

    type: Literal["ipo"] = "ipo"
    ipo_threshold: float = Field(default=0.1, gt=0)
    """Drop a token whose probability moved by more than this either way."""

    def surrogate(self, seen: SeenByLoss) -> tuple[Tensor, Tensor]:
        is_masked_K = seen.moved_K.abs() > self.ipo_threshold
        return (seen.log_ratio_K.exp() * seen.columns.advantages).masked_fill(is_masked_K, 0.0), is_masked_K
