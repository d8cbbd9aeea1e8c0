"""Masked importance sampling: the ratio weighs each token, and what moved too far either way is left out.

surrogate = keep sg(min(w, cap)) A l, with w the ratio of the token, the product over its sequence's members, or their
geometric mean (`level`). keep asks three things, each with both bounds and each left out where its bound is None:

    of the token         token_low <= r <= token_high
    of its sequence      sequence_low <= product of r <= sequence_high
                         geometric_low <= geometric mean of r <= geometric_high
    of its mates         no member of the sequence has a ratio above `max_token_ratio`

Sources: the masks of INTELLECT-3, arXiv 2512.16144 (r in [.125, 8], geometric mean in [.1, 10], ratio at most 100,
which are the defaults); IcePop (token bounds .5 and 5); the geometric masks .99 to 1.01 of sequence-level rejection.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from mettle.trainer.losses import Level, PolicyLoss, SeenByLoss
from mettle.trainer.losses.surrogates import weighted_logprob

if TYPE_CHECKING:
    from torch import Tensor


class MaskedIsLoss(PolicyLoss):
    """Leaves out tokens, and whole sequences, that moved too far from their sampler."""

    type: Literal["masked_is"] = "masked_is"
    level: Level = "token"
    """Whose ratio weighs a token that is kept: its own, the sequence's (the product), or the geometric mean."""
    cap: float | None = Field(default=None, gt=0)
    """The weight counts up to this; None leaves it to the bounds. A product over a sequence wants one (10 is usual)."""
    token_low: float | None = Field(default=0.125, ge=0)
    """Drop a token whose ratio is below this; None drops none."""
    token_high: float | None = Field(default=8.0, gt=0)
    """Drop a token whose ratio is above this; None drops none."""
    sequence_low: float | None = Field(default=None, ge=0)
    """Drop a sequence whose product of ratios is below this; None drops none."""
    sequence_high: float | None = Field(default=None, gt=0)
    """Drop a sequence whose product of ratios is above this; None drops none."""
    geometric_low: float | None = Field(default=0.1, ge=0)
    """Drop a sequence whose geometric mean of ratios is below this; None drops none."""
    geometric_high: float | None = Field(default=10.0, gt=0)
    """Drop a sequence whose geometric mean of ratios is above this; None drops none."""
    max_token_ratio: float | None = Field(default=100.0, gt=0)
    """Drop a sequence with a token whose ratio is above this; None drops none."""

    @model_validator(mode="after")
    def _in_order(self) -> MaskedIsLoss:
        for name in ("token", "sequence", "geometric"):
            low, high = self._bounds(name)
            if low > high:
                raise ValueError(f"{name}_low {low:g} is above {name}_high {high:g}, so nothing would train")
        return self

    def surrogate(self, seen: SeenByLoss) -> tuple[Tensor, Tensor]:
        own_K = seen.log_ratio("token", self.log_ratio_clamp)
        is_out_K = _outside(own_K, *self._bounds("token"))
        # The product is bounded as it is, and cut only where it is taken as a weight.
        is_out_K = is_out_K | _outside(seen.sequence_sum(own_K), *self._bounds("sequence"))
        is_out_K = is_out_K | _outside(seen.sequence_mean(own_K), *self._bounds("geometric"))
        if self.max_token_ratio is not None:
            is_far_K = own_K > math.log(self.max_token_ratio)
            is_out_K = is_out_K | (seen.sequence_sum(is_far_K.to(own_K.dtype)) > 0)
        weight_K = seen.log_ratio(self.level, self.log_ratio_clamp).exp()
        if self.cap is not None:
            weight_K = weight_K.clamp(max=self.cap)
        gain_K = weighted_logprob(weight_K, seen.columns.advantages, seen.logprobs_K)
        return gain_K.masked_fill(is_out_K, 0.0), is_out_K

    def _bounds(self, name: str) -> tuple[float, float]:
        low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
        return 0.0 if low is None else low, math.inf if high is None else high


def _outside(log_ratio_K: Tensor, low: float, high: float) -> Tensor:
    low, high = math.log(low) if low else -math.inf, math.log(high) if high < math.inf else math.inf
    return (log_ratio_K < low) | (log_ratio_K > high)
