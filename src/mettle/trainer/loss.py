"""The loss: rl + ce + ref_kl + distill, each divided by its own global token count; blind to the algorithm.

For a trained token: l is its log-probability under the policy being trained, m under the sampler (as recorded), A the
advantage, w the component's weight, k = l - m cut to +-`log_ratio_clamp`, r = exp(k), D = exp(l) - exp(m).

    rl      w [ kl_tau P - adv_tau surrogate - entropy_tau H ]   H the entropy of the token's distribution; the
                                                      surrogate is that of the configured loss (`losses/`), P its
                                                      penalty: k^2, or r - k - 1
    ref_kl  w [ ref_kl_tau P - keep sg(ref - l) r ]   keep unless D < -mask_low
    ce      -w l
    distill w divergence of the token's whole distribution from a teacher's (`distillation`)

A token that is held back stays in the denominator. Who is a member, and so trains and counts, was settled when the
batch was laid out (`layout.Sequences`). Checked against a NumPy twin in tests/trainer/test_loss.py.

Legend: K trained tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from mettle.records.tokens import TokenRow
from mettle.trainer.layout import ComponentCounts, Targets
from mettle.trainer.losses import PolicyLoss, SeenByLoss

SUM_NAMES = (
    "rl", "ce", "ref_kl", "entropy", "num_tokens", "mismatch_kl", "num_sampled", "num_masked", "num_rl", "num_clamped",
    "distill",
)  # fmt: skip
"""What one pass adds up over its tokens; a step sums these over passes and ranks."""


@dataclass(frozen=True, slots=True)
class TargetTensors(TokenRow[Tensor, Tensor, Tensor]):
    """`layout.Targets` on the device: every tensor is [K], of a wide column [K, k]."""

    sequences: Tensor

    @classmethod
    def of(cls, targets: Targets, device: torch.device) -> TargetTensors:
        return cls(**{f.name: torch.from_numpy(getattr(targets, f.name)).to(device) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` to backpropagate; without gradient `sums`, named by the loss's `sum_names`, and the largest mismatch."""

    loss: Tensor
    sums: Tensor
    max_mismatch_kl: Tensor


class TargetLoss(Protocol):
    """A loss of the targets of one pass; the shares of all passes add up."""

    @property
    def has_entropy(self) -> bool:
        """Whether the entropies need a gradient."""

    @property
    def sum_names(self) -> tuple[str, ...]:
        """What its `LossOutput.sums` are."""

    @property
    def has_teacher(self) -> bool:
        """Whether targets are compared with a teacher."""

    def __call__(
        self, logprobs_K: Tensor, entropy_K: Tensor, targets: TargetTensors, divergence_K: Tensor | None = None
    ) -> LossOutput:
        """One pass's share. `divergence_K` is from the teacher, where there is one."""


def token_logprobs(
    logits_KV: Tensor, labels_K: Tensor, temperatures_K: Tensor, *, has_entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of its distribution, both at the temperature it was sampled with.

    In float32 whatever the logits are. The entropy carries a gradient only where it is asked for: it costs memory.
    """
    logprobs_KV = torch.log_softmax(logits_KV.float() / temperatures_K[:, None], dim=-1)
    logprobs_K = logprobs_KV.gather(-1, labels_K[:, None]).squeeze(-1)
    with torch.set_grad_enabled(has_entropy_gradient and torch.is_grad_enabled()):
        entropy_K = -(logprobs_KV.exp() * logprobs_KV).sum(-1)
    return logprobs_K, entropy_K


def total_loss(
    logprobs_K: Tensor,
    entropy_K: Tensor,
    targets: TargetTensors,
    counts: ComponentCounts,
    form: PolicyLoss,
    divergence_K: Tensor | None = None,
) -> LossOutput:
    """One pass's share of the batch's loss. Adding the shares of all passes of all ranks gives the loss."""
    is_rl_K = targets.rl_weights != 0
    is_ref_kl_K = targets.ref_kl_weights != 0
    is_compared_K = is_rl_K | is_ref_kl_K
    # A token that is only imitated has no sampler and is compared with itself: ratio 1, no mismatch.
    sampler_K = torch.where(is_compared_K, targets.logprobs, logprobs_K.detach())
    raw_K = logprobs_K - sampler_K
    log_ratio_K = raw_K.clamp(-form.log_ratio_clamp, form.log_ratio_clamp)
    moved_K = logprobs_K.detach().exp() - sampler_K.exp()

    # Under "none" the policy is compared with itself: every ratio is 1, and the gradient that of its logarithm.
    own_K = log_ratio_K if form.ratio == "token" else logprobs_K - logprobs_K.detach()
    seen = SeenByLoss(logprobs_K, own_K, moved_K, is_rl_K, targets.sequences, targets)
    surrogate_K, is_masked_K = form.surrogate(seen)
    # What leaving the sampler costs. Source of k3: joschu.net/blog/kl-approx.html.
    penalty_K = log_ratio_K.exp() - log_ratio_K - 1 if form.kl == "k3" else log_ratio_K.square()
    rl_K = form.kl_tau * penalty_K - form.adv_tau * surrogate_K
    if form.entropy_tau:
        rl_K = rl_K - form.entropy_tau * entropy_K
    rl_K = torch.where(is_rl_K, targets.rl_weights * rl_K, 0.0)
    # On-policy distillation: the reference's surprise is the advantage. Source: arXiv 2306.13649.
    pull_K = (targets.ref_logprobs - logprobs_K).detach() * log_ratio_K.exp()
    ref_kl_K = form.ref_kl_tau * penalty_K - torch.where(moved_K < -form.mask_low, 0.0, pull_K)
    ref_kl_K = torch.where(is_ref_kl_K, targets.ref_kl_weights * ref_kl_K, 0.0)
    ce_K = -(targets.ce_weights * logprobs_K)

    distill_K = torch.zeros_like(ce_K) if divergence_K is None else targets.distill_weights * divergence_K

    rl, ce, ref_kl, distill = rl_K.sum(), ce_K.sum(), ref_kl_K.sum(), distill_K.sum()
    loss = rl / max(1, counts.rl) + ce / max(1, counts.ce) + ref_kl / max(1, counts.ref_kl)
    loss = loss + distill / max(1, counts.distill)
    with torch.no_grad():
        mismatch_K = torch.where(is_compared_K, log_ratio_K.exp() - log_ratio_K - 1, 0.0)
        figures: Sequence[Tensor] = (
            rl, ce, ref_kl, entropy_K.sum(), torch.ones_like(entropy_K).sum(), mismatch_K.sum(), is_compared_K.sum(),
            (is_masked_K & is_rl_K).sum(), is_rl_K.sum(), (is_compared_K & (raw_K.abs() > form.log_ratio_clamp)).sum(),
            distill,
        )  # fmt: skip
        sums = torch.stack([figure.detach().double() for figure in figures])
        largest = mismatch_K.amax().double() if mismatch_K.numel() else torch.zeros_like(sums[0])
    return LossOutput(loss, sums, largest)


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """`total_loss` of a batch whose components have `counts` members."""

    form: PolicyLoss
    counts: ComponentCounts

    @property
    def has_entropy(self) -> bool:
        return self.form.entropy_tau > 0

    @property
    def has_teacher(self) -> bool:
        return self.counts.distill > 0

    @property
    def sum_names(self) -> tuple[str, ...]:
        return SUM_NAMES

    def __call__(
        self, logprobs_K: Tensor, entropy_K: Tensor, targets: TargetTensors, divergence_K: Tensor | None = None
    ) -> LossOutput:
        return total_loss(logprobs_K, entropy_K, targets, self.counts, self.form, divergence_K)
