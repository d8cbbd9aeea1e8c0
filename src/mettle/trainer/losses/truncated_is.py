"""Truncated importance sampling: the ratio weighs each token, up to a cap.

surrogate = sg(min(w, cap)) A l, with w the ratio of the token, the product over its sequence's members, or their
geometric mean. Tokens that became unlikely keep their small weight; the cap bounds the variance of those that became
likely. Sources: truncated importance sampling, Ionides 2008; for the gap between engine and trainer, "Your efficient RL
framework secretly brings you off-policy RL training" (Yao et al. 2025), whose cap is 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mettle.trainer.losses import Level, PolicyLoss, SeenByLoss
from mettle.trainer.losses.surrogates import weighted_logprob

if TYPE_CHECKING:
    from torch import Tensor


class TruncatedIsLoss(PolicyLoss):
    """Caps the weight of each token and keeps its gradient."""

    type: Literal["truncated_is"] = "truncated_is"
    level: Level = "token"
    """Whose ratio weighs the token: its own, the sequence's (the product), or the geometric mean over the sequence."""
    cap: float = Field(default=2.0, gt=0)
    """The ratio counts up to this."""

    def surrogate(self, seen: SeenByLoss) -> tuple[Tensor, Tensor]:
        ratio_K = seen.log_ratio(self.level, self.log_ratio_clamp).exp()
        capped_K = ratio_K.clamp(max=self.cap)
        return weighted_logprob(capped_K, seen.columns.advantages, seen.logprobs_K), ratio_K > self.cap
