"""The loss: rl + ce + ref_kl, each divided by its own global token count. Blind to the algorithm that set the weights.

For a trained token: l is its log-probability under the policy being trained, m under the sampler (as recorded), A the
advantage, w the component's weight, k = l - m cut to +-`log_ratio_clamp`, r = exp(k), D = exp(l) - exp(m).

    default   w [ -keep adv_tau A r + kl_tau k^2 ]    keep unless D > mask_high (A > 0) or D < -mask_low (A <= 0)
    ipo       the same, keep unless |D| > ipo_threshold
    ppo_clip  w [ -adv_tau min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_tau k^2 ]
    ref_kl    w [ -keep sg(ref - l) r + ref_kl_tau k^2 ]    keep unless D < -mask_low
    ce        -w l

A masked token stays in the denominator. A token without a finite sampler logprob trains nothing in rl and ref_kl, and
is counted. Checked against a NumPy twin in tests/trainer/test_loss.py.

Legend: K trained tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.trainer.config import LossConfig
from mettle.trainer.layout import ComponentCounts, Targets

SUM_NAMES = (
    "rl", "ce", "ref_kl", "entropy", "num_tokens", "mismatch_kl", "num_sampled", "num_masked", "num_rl",
    "num_clamped", "num_non_finite",
)  # fmt: skip
"""What one pass adds up over its tokens; a step sums these over passes and ranks."""


@dataclass(frozen=True, slots=True)
class TargetTensors:
    """`layout.Targets` on the device."""

    labels_K: Tensor
    temperatures_K: Tensor
    logprobs_K: Tensor
    advantages_K: Tensor
    is_sampled_K: Tensor
    rl_weights_K: Tensor
    ce_weights_K: Tensor
    ref_kl_weights_K: Tensor
    ref_logprobs_K: Tensor

    @classmethod
    def of(cls, targets: Targets, device: torch.device) -> TargetTensors:
        names = [name.removesuffix("_K") for name in cls.__dataclass_fields__]
        return cls(*(torch.from_numpy(getattr(targets, name)).to(device) for name in names))


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` to backpropagate; `sums` in the order of `SUM_NAMES` and the largest mismatch, without gradient."""

    loss: Tensor
    sums: Tensor
    max_mismatch_kl: Tensor


def token_logprobs(logits_KV: Tensor, labels_K: Tensor, temperatures_K: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of its distribution, both at the temperature it was sampled with.

    In float32 whatever the logits are. The entropy carries no gradient.
    """
    logprobs_KV = torch.log_softmax(logits_KV.float() / temperatures_K[:, None], dim=-1)
    logprobs_K = logprobs_KV.gather(-1, labels_K[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy_K = -(logprobs_KV.exp() * logprobs_KV).sum(-1)
    return logprobs_K, entropy_K


def total_loss(
    logprobs_K: Tensor, entropy_K: Tensor, targets: TargetTensors, counts: ComponentCounts, config: LossConfig
) -> LossOutput:
    """One pass's share of the batch's loss. Adding the shares of all passes of all ranks gives the loss."""
    is_rl_K = targets.rl_weights_K != 0
    is_ref_kl_K = targets.ref_kl_weights_K != 0
    is_known_K = torch.isfinite(targets.logprobs_K) & targets.is_sampled_K
    # A token without a sampler logprob is compared with itself: ratio 1, no mismatch.
    sampler_K = torch.where(is_known_K, targets.logprobs_K, logprobs_K.detach())
    raw_K = logprobs_K - sampler_K
    log_ratio_K = raw_K.clamp(-config.log_ratio_clamp, config.log_ratio_clamp)
    moved_K = logprobs_K.detach().exp() - sampler_K.exp()

    rl_K, is_masked_K = _rl_terms(logprobs_K, log_ratio_K, moved_K, targets.advantages_K, config)
    rl_K = torch.where(is_rl_K & is_known_K, targets.rl_weights_K * rl_K, 0.0)
    ref_kl_K = _ref_kl_terms(logprobs_K, log_ratio_K, moved_K, targets.ref_logprobs_K, config)
    ref_kl_K = torch.where(is_ref_kl_K & is_known_K, targets.ref_kl_weights_K * ref_kl_K, 0.0)
    ce_K = -(targets.ce_weights_K * logprobs_K)

    rl, ce, ref_kl = rl_K.sum(), ce_K.sum(), ref_kl_K.sum()
    loss = rl / max(1, counts.rl) + ce / max(1, counts.ce) + ref_kl / max(1, counts.ref_kl)
    with torch.no_grad():
        is_compared_K = (is_rl_K | is_ref_kl_K) & is_known_K
        mismatch_K = torch.where(is_compared_K, log_ratio_K.exp() - log_ratio_K - 1, 0.0)
        figures: Sequence[Tensor] = (
            rl, ce, ref_kl, entropy_K.sum(), torch.ones_like(entropy_K).sum(), mismatch_K.sum(), is_compared_K.sum(),
            (is_masked_K & is_rl_K & is_known_K).sum(), is_rl_K.sum(),
            (is_compared_K & (raw_K.abs() > config.log_ratio_clamp)).sum(),
            ((is_rl_K | is_ref_kl_K) & ~is_known_K).sum(),
        )  # fmt: skip
        sums = torch.stack([figure.detach().double() for figure in figures])
        largest = mismatch_K.amax().double() if mismatch_K.numel() else torch.zeros_like(sums[0])
    return LossOutput(loss, sums, largest)


def _rl_terms(
    logprobs_K: Tensor, log_ratio_K: Tensor, moved_K: Tensor, advantages_K: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Loss of each token before its weight, and which tokens the trust region holds back."""
    ratio_K = log_ratio_K.exp() if config.ratio == "token" else (logprobs_K - logprobs_K.detach()).exp()
    gain_K = ratio_K * advantages_K
    penalty_K = config.kl_tau * log_ratio_K.square()
    if config.type == "ppo_clip":
        clipped_K = ratio_K.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_K
        return penalty_K - config.adv_tau * torch.minimum(gain_K, clipped_K), clipped_K < gain_K
    if config.type == "ipo":
        is_masked_K = moved_K.abs() > config.ipo_threshold
    else:
        is_masked_K = torch.where(advantages_K > 0, moved_K > config.mask_high, moved_K < -config.mask_low)
    return penalty_K - config.adv_tau * torch.where(is_masked_K, 0.0, gain_K), is_masked_K


def _ref_kl_terms(
    logprobs_K: Tensor, log_ratio_K: Tensor, moved_K: Tensor, ref_logprobs_K: Tensor, config: LossConfig
) -> Tensor:
    gain_K = (ref_logprobs_K - logprobs_K).detach() * log_ratio_K.exp()
    return config.ref_kl_tau * log_ratio_K.square() - torch.where(moved_K < -config.mask_low, 0.0, gain_K)
