"""Losses: what a trained token contributes to the policy-gradient component. One small file each, formula and paper.

A loss is a pydantic model: its fields are its options, `[trainer.loss]` in a config, and `surrogate` is the formula. It
is registered by name, here and under the entry point group `mettle.losses`, or named as `module:attribute`. A module of
losses imports no torch when it is imported (tensors bring their own methods), so that a config is checked without it.

Parts: `PolicyLoss` (the base class), `SeenByLoss` (what a formula is given), `LOSSES` (the registry), `make_loss`.
Legend: K trained tokens of one forward pass. A sequence is never split over passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mettle.config.plugins import Plugins
from mettle.trainer.losses.surrogates import sequence_mean, sequence_sum

if TYPE_CHECKING:
    from torch import Tensor

    from mettle.records.tokens import TokenRow

LOSSES = Plugins(
    "mettle.losses",
    "loss",
    {
        "default": "mettle.trainer.losses.default:DefaultLoss",
        "ipo": "mettle.trainer.losses.ipo:IpoLoss",
        "ppo_clip": "mettle.trainer.losses.ppo_clip:PpoClipLoss",
        "gspo": "mettle.trainer.losses.gspo:GspoLoss",
        "cispo": "mettle.trainer.losses.cispo:CispoLoss",
        "truncated_is": "mettle.trainer.losses.truncated_is:TruncatedIsLoss",
        "masked_is": "mettle.trainer.losses.masked_is:MaskedIsLoss",
        "importance_sampling": "mettle.trainer.losses.importance_sampling:ImportanceSamplingLoss",
        "dro": "mettle.trainer.losses.dro:DroLoss",
    },
)
Level = Literal["token", "sequence", "geometric"]
"""Whose ratio: the token's, the product over its sequence's members, or the geometric mean over them."""


@dataclass(frozen=True, slots=True)
class SeenByLoss:
    """One pass's K targets as a loss sees them. l: log-probability under the policy, m: under the sampler.

    `logprobs_K` is l and `log_ratio_K` is l - m cut to +-`log_ratio_clamp` (0 under ratio "none"), both with gradient;
    `moved_K` is exp(l) - exp(m) without. `columns` has every column of a token; `sequence_K` numbers each token's
    sequence in the pass, from 0 to less than K. `is_member_K` is True on the tokens that train in this component: only
    their terms count, and only they belong in what is taken over a sequence.
    """

    logprobs_K: Tensor
    log_ratio_K: Tensor
    moved_K: Tensor
    is_member_K: Tensor
    sequence_K: Tensor
    columns: TokenRow[Tensor, Tensor, Tensor]

    def sequence_mean(self, values_K: Tensor) -> Tensor:
        """[K]: for each token the mean of `values_K` over the members of its sequence; 0 where it has none."""
        return sequence_mean(values_K, self.is_member_K, self.sequence_K)

    def sequence_sum(self, values_K: Tensor) -> Tensor:
        """[K]: for each token the sum of `values_K` over the members of its sequence."""
        return sequence_sum(values_K, self.is_member_K, self.sequence_K)

    def log_ratio(self, level: Level, limit: float) -> Tensor:
        """[K] without gradient: of the token itself, of its sequence (at most `limit` either way), or their mean."""
        own_K = self.log_ratio_K.detach()
        if level == "token":
            return own_K
        if level == "geometric":
            return self.sequence_mean(own_K)
        return self.sequence_sum(own_K).clamp(-limit, limit)


class PolicyLoss(BaseModel):
    """What all losses have in common.

    A token's term is w (kl_tau P - adv_tau surrogate - entropy_tau H), P the penalty `kl` for leaving the sampler, H
    the entropy.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: Literal["token", "none"] = "token"
    """token: importance ratios against the sampler's logprobs; none: all are 1 (right only without lag)."""
    adv_tau: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Weight of the advantage term, without which no reward counts."""
    kl: Literal["squared", "k3"] = "squared"
    """The penalty for leaving the sampler: squared is k^2; k3 is exp(k) - k - 1, whose mean is the KL divergence of the
    policy from the sampler (never negative, and of less variance than -k)."""
    kl_tau: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Weight of that penalty. The tiny recipe uses 0."""
    entropy_tau: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the entropy of a trained token's distribution: keeps alternatives alive that noise would close. It
    fades with the learning rate; at half the peak rate it is half of this."""
    mask_low: float = Field(default=0.2, gt=0)
    """ref_kl and default: drop a token whose probability fell by more than this (where its advantage is not > 0)."""
    ref_kl_tau: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Weight of the same penalty inside the ref_kl component."""
    log_ratio_clamp: float = Field(default=20.0, gt=0, le=80)
    """Log-ratios beyond this are cut (their gradient is 0) and counted, so that exp() stays finite."""

    def surrogate(self, seen: SeenByLoss) -> tuple[Tensor, Tensor]:
        """([K] what is to be made large, before weights; [K] True where a trust region holds the token back)."""
        raise NotImplementedError

    def build(self) -> PolicyLoss:
        """The loss that this configures."""
        return self


def make_loss(name: str, options: Mapping[str, Any]) -> PolicyLoss:
    """The loss called `name`. Raises: ValueError for an unknown name or option."""
    kind = LOSSES.find(name)
    if not (isinstance(kind, type) and issubclass(kind, PolicyLoss)):
        raise ValueError(f"loss {name!r} is no subclass of mettle.trainer.losses.PolicyLoss")
    try:
        return kind(**options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"loss {name!r}: {where}: {first['msg']}; it takes {', '.join(kind.model_fields)}") from error
