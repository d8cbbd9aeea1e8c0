"""GSPO: PPO's clip on the ratio of whole sequences, since it is sequences that are rewarded.

s = exp(mean over the sequence's members of k), and for token t the ratio s_t = sg(s) exp(l - sg(l)), which has s as its
value and the token's own gradient; surrogate = min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t). With one
advantage a sequence its gradient is that of the sequence form over the number of tokens. Source: GSPO (and GSPO-token),
arXiv 2507.18071, whose small bounds are the defaults: a mean over a sequence moves less than a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mettle.trainer.losses import PolicyLoss, SeenByLoss
from mettle.trainer.losses.surrogates import as_token_ratio, clipped_gain

if TYPE_CHECKING:
    from torch import Tensor


class GspoLoss(PolicyLoss):
    """Clips the ratio of each sequence."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """The sequence's ratio counts down to 1 - clip_low."""
    clip_high: float = Field(default=4e-4, gt=0)
    """The sequence's ratio counts up to 1 + clip_high."""

    def surrogate(self, seen: SeenByLoss) -> tuple[Tensor, Tensor]:
        ratio_K = as_token_ratio(seen.log_ratio("geometric", self.log_ratio_clamp), seen.logprobs_K)
        return clipped_gain(ratio_K, seen.columns.advantages, 1 - self.clip_low, 1 + self.clip_high)
