"""DRO: direct reward optimisation, a policy gradient without ratios that a quadratic penalty holds near the sampler.

surrogate = A l, and kl_tau k^2 beside it, with kl_tau = beta / 2: the penalty does what a clip does elsewhere, so it
must not be left out with lag. Source: arXiv 2405.19107 (its beta .05 is the default here).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mettle.trainer.losses import PolicyLoss, SeenByLoss

if TYPE_CHECKING:
    from torch import Tensor


class DroLoss(PolicyLoss):
    """Advantage times log-probability, and a pull towards the sampler."""

    type: Literal["dro"] = "dro"
    kl_tau: float = Field(default=0.025, ge=0)
    """Half of the paper's beta: weight of the pull towards the sampler."""

    def surrogate(self, seen: SeenByLoss) -> tuple[Tensor, Tensor]:
        return seen.columns.advantages * seen.logprobs_K, seen.is_member_K.logical_and(~seen.is_member_K)
