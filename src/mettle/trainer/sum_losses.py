"""Losses as sums over tokens, as the training service offers them: no mean anywhere, so that calls add up.

Over the targets of all data, with p the policy's log-probability of a target, q that of the sampler (`logprobs`), A the
`advantages`, w the `weights`, r = exp(p - q), and sg() what carries no gradient:

    cross_entropy         -w p
    importance_sampling   -r A
    ppo                   -min(r A, clip(r, low, high) A)
    cispo                 -sg(clip(r, low, high)) A p
    dro                   -(A p - beta/2 (p - q)^2)
    gspo                  -min(s A, clip(s, low, high) A), where s is exp of the mean of p - q over the datum's tokens
                          with `sequence_ratio_mask`; a token has the gradient of its own p, s_t = sg(s) exp(p - sg(p))

The formulas are those of `losses/surrogates.py`. Unlike `losses/`, which the RL loop divides by token counts, nothing
is normalised, clamped or masked here: a client of the service does that by its inputs. Checked against naive loops and
finite differences in tests/trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from mettle.trainer.loss import LossOutput, TargetTensors
from mettle.trainer.losses.surrogates import as_token_ratio, clipped_gain, sequence_mean, weighted_logprob


class SumLoss(BaseModel):
    """A loss by its terms. Its fields are the loss's config; `inputs` are what each datum has to bring."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")

    def terms(self, logprobs_K: Tensor, targets: TargetTensors) -> Tensor:
        """[K] what each target adds to the loss."""
        raise NotImplementedError

    @property
    def has_entropy(self) -> bool:
        """None of them reads the entropies."""
        return False

    @property
    def has_teacher(self) -> bool:
        """None of them has a teacher."""
        return False

    @property
    def sum_names(self) -> tuple[str, ...]:
        """What it tells."""
        return ("loss", "num_tokens")

    def __call__(
        self, logprobs_K: Tensor, entropy_K: Tensor, targets: TargetTensors, divergence_K: Tensor | None = None
    ) -> LossOutput:
        """One pass's share of the loss."""
        loss = self.terms(logprobs_K, targets).sum()
        sums = torch.stack([loss.detach().double(), torch.ones_like(logprobs_K.detach()).double().sum()])
        return LossOutput(loss, sums, torch.zeros_like(sums[0]))


class CrossEntropySum(SumLoss):
    """Imitation, each target with its own weight, which may be negative or a fraction."""

    inputs: ClassVar[tuple[str, ...]] = ("weights",)

    def terms(self, logprobs_K: Tensor, targets: TargetTensors) -> Tensor:
        return -(targets.ce_weights * logprobs_K)


class ImportanceSamplingSum(SumLoss):
    """The policy gradient with plain importance ratios."""

    def terms(self, logprobs_K: Tensor, targets: TargetTensors) -> Tensor:
        return -(logprobs_K - targets.logprobs).exp() * targets.advantages


class RatioBounds(SumLoss):
    """Bounds of the ratio itself, not of its distance from 1."""

    clip_low_threshold: float = Field(default=0.8, ge=0)
    """The ratio counts down to this."""
    clip_high_threshold: float = Field(default=1.2, ge=0)
    """The ratio counts up to this."""

    @model_validator(mode="after")
    def _in_order(self) -> RatioBounds:
        low, high = self.clip_low_threshold, self.clip_high_threshold
        if low > high:
            raise ValueError(f"clip_low_threshold {low} is above clip_high_threshold {high}")
        return self

    def gain(self, ratio_K: Tensor, targets: TargetTensors) -> Tensor:
        """PPO's surrogate within the bounds."""
        return clipped_gain(ratio_K, targets.advantages, self.clip_low_threshold, self.clip_high_threshold)[0]


class PpoSum(RatioBounds):
    """The clipped surrogate of PPO, arXiv 1707.06347."""

    def terms(self, logprobs_K: Tensor, targets: TargetTensors) -> Tensor:
        ratio_K = (logprobs_K - targets.logprobs).exp()
        return -self.gain(ratio_K, targets)


class CispoSum(RatioBounds):
    """The ratio clipped as a weight, arXiv 2506.13585; one-sided unless the bounds are given."""

    clip_low_threshold: float = Field(default=0.0, ge=0)
    clip_high_threshold: float = Field(default=4.0, ge=0)

    def terms(self, logprobs_K: Tensor, targets: TargetTensors) -> Tensor:
        ratio_K = (logprobs_K - targets.logprobs).exp()
        weight_K = ratio_K.clamp(self.clip_low_threshold, self.clip_high_threshold)
        return -weighted_logprob(weight_K, targets.advantages, logprobs_K)


class DroSum(SumLoss):
    """Direct reward optimisation, arXiv 2405.19107: a quadratic pull towards the sampler."""

    beta: float = Field(default=0.05, ge=0)
    """Weight of the pull."""

    def terms(self, logprobs_K: Tensor, targets: TargetTensors) -> Tensor:
        pull_K = (logprobs_K - targets.logprobs).square() * (self.beta / 2)
        return pull_K - targets.advantages * logprobs_K


class GspoSum(RatioBounds):
    """PPO's clip on the ratio of whole sequences, arXiv 2507.18071, whose small bounds are the defaults."""

    inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages", "sequence_ratio_mask")

    clip_low_threshold: float = Field(default=1 - 3e-4, ge=0)
    clip_high_threshold: float = Field(default=1 + 4e-4, ge=0)

    def terms(self, logprobs_K: Tensor, targets: TargetTensors) -> Tensor:
        mean_K = sequence_mean(logprobs_K.detach() - targets.logprobs, targets.loss_mask, targets.sequences)
        return -self.gain(as_token_ratio(mean_K, logprobs_K), targets)


SUM_LOSSES: dict[str, type[SumLoss]] = {
    "cross_entropy": CrossEntropySum,
    "importance_sampling": ImportanceSamplingSum,
    "ppo": PpoSum,
    "cispo": CispoSum,
    "dro": DroSum,
    "gspo": GspoSum,
}
"""By the name that the service's clients use."""


def make_sum_loss(name: str, options: Mapping[str, Any] | None = None) -> SumLoss:
    """The loss called `name`. Raises: ValueError for an unknown name, an unknown option or a value out of range."""
    kind = SUM_LOSSES.get(name)
    if kind is None:
        raise ValueError(f"there is no loss {name!r}; there are {', '.join(SUM_LOSSES)}")
    try:
        return kind(**(options or {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        takes = ", ".join(kind.model_fields) or "no options"
        raise ValueError(f"loss {name!r}: {where + ': ' if where else ''}{first['msg']}; it takes {takes}") from error
