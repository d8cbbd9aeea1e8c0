"""Importance sampling: the plain policy gradient of what another policy sampled, without any bound.

surrogate = r A. Unbiased, and of a variance that grows with every step that the sampler is behind: with lag, take a
loss that clips, caps or masks. Source: REINFORCE with importance weights, Sutton and Barto 5.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mettle.trainer.losses import PolicyLoss, SeenByLoss

if TYPE_CHECKING:
    from torch import Tensor


class ImportanceSamplingLoss(PolicyLoss):
    """The ratio as it is."""

    type: Literal["importance_sampling"] = "importance_sampling"

    def surrogate(self, seen: SeenByLoss) -> tuple[Tensor, Tensor]:
        return seen.log_ratio_K.exp() * seen.columns.advantages, seen.is_member_K.logical_and(~seen.is_member_K)
