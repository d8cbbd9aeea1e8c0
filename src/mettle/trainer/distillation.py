"""Distillation on whole distributions: at each place the policy is compared with what a teacher would have put there.

With t and s the log-probabilities of teacher and policy over the same outcomes, T = exp(t), S = exp(s):

    forward_kl   sum T (t - s)                         covers all that the teacher does
    reverse_kl   sum S (s - t)                         settles on what the teacher does most
    jsd          b sum T (t - m) + (1 - b) sum S (s - m), m = log(b T + (1 - b) S): between them, and bounded

The outcomes are the whole vocabulary where a frozen teacher lives in the trainer, and k tokens with one outcome for all
the others where a batch brings the teacher's k likeliest (columns `teacher_ids`, `teacher_logprobs`). Lumping outcomes
together never makes a divergence larger, so k tokens give a lower bound that is exact from k = V on. Sources: GKD,
arXiv 2306.13649; MiniLLM, arXiv 2306.08543 (reverse KL).

Parts: `divergence`, `listed` (to k + 1 outcomes), `Distiller` (what a learner asks). Places are sampled by the policy,
and no gradient goes through the sampling. Legend: K targets, V vocabulary, O outcomes, k listed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.errors import UserError
from mettle.trainer.config import DistillationConfig
from mettle.trainer.layout import Layout
from mettle.trainer.loss import TargetTensors
from mettle.trainer.model import Policy, TeacherComparison

LEAST_REST = 1e-6
"""What is left for the tokens that a teacher didn't list is no less than this: its numbers are no more exact."""


def divergence(policy_KO: Tensor, teacher_KO: Tensor, config: DistillationConfig) -> Tensor:
    """[K], never negative but for rounding. Outcomes at which the teacher's log-probability is -inf are left out."""
    is_there_KO = torch.isfinite(teacher_KO)
    s, t = policy_KO.masked_fill(~is_there_KO, 0.0), teacher_KO.masked_fill(~is_there_KO, 0.0)
    if config.divergence == "forward_kl":
        terms = t.exp() * (t - s)
    elif config.divergence == "reverse_kl":
        terms = s.exp() * (s - t)
    else:
        b = config.jsd_weight
        m = torch.logaddexp(t + math.log(b), s + math.log1p(-b))
        terms = b * t.exp() * (t - m) + (1 - b) * s.exp() * (s - m)
    return terms.masked_fill(~is_there_KO, 0.0).sum(-1)


def listed(logits_KV: Tensor, teacher_ids_Kk: Tensor, teacher_Kk: Tensor) -> tuple[Tensor, Tensor]:
    """Policy and teacher over the listed tokens and, last, all others together ([K, k + 1]; [K, V] where k is V)."""
    # A teacher that listed fewer leaves -inf; such a place says its first token again, so that no other loses mass.
    ids_Kk = torch.where(torch.isfinite(teacher_Kk), teacher_ids_Kk, teacher_ids_Kk[:, :1]).long()
    logprobs_KV = torch.log_softmax(logits_KV, dim=-1)
    policy_Kk = logprobs_KV.gather(-1, ids_Kk)
    if ids_Kk.shape[1] >= logits_KV.shape[1]:
        return policy_Kk, teacher_Kk
    others_K = logprobs_KV.scatter(-1, ids_Kk, -torch.inf).logsumexp(-1)
    rest_K = torch.log1p(-teacher_Kk.logsumexp(-1).exp().clamp(max=1 - LEAST_REST))
    return torch.cat([policy_Kk, others_K[:, None]], -1), torch.cat([teacher_Kk, rest_K[:, None]], -1)


@dataclass(slots=True)
class Distiller:
    """Compares the policy with a teacher. `teacher` is None where batches bring what one said."""

    config: DistillationConfig
    teacher: Policy | None = None

    def comparison(self, layout: Layout, targets: TargetTensors) -> TeacherComparison:
        """How the K targets of a pass are compared.

        Raises: UserError when neither the batch nor the trainer has a teacher.
        """
        if targets.teacher_ids.shape[1]:
            return TeacherComparison(
                self._with_listed, (targets.temperatures, targets.teacher_ids, targets.teacher_logprobs)
            )
        if self.teacher is None:
            raise UserError(
                "the batch is to be fitted to a teacher's whole distribution, and the trainer has no teacher: name its"
                " folder in trainer.distillation.teacher, or give the algorithm a top_k"
            )
        with torch.no_grad():
            hidden_KH = self.teacher.hidden_at(layout, targets.token_ids.device)
        return TeacherComparison(self._with_teacher(self.teacher), (targets.temperatures, hidden_KH))

    def _with_listed(self, logits_KV: Tensor, temperatures_K: Tensor, ids_Kk: Tensor, teacher_Kk: Tensor) -> Tensor:
        policy_KO, teacher_KO = listed(logits_KV.float() / temperatures_K[:, None], ids_Kk, teacher_Kk)
        return divergence(policy_KO, teacher_KO, self.config)

    def _with_teacher(self, teacher: Policy) -> Callable[..., Tensor]:
        def compare(logits_KV: Tensor, temperatures_K: Tensor, hidden_KH: Tensor) -> Tensor:
            with torch.no_grad():
                told_KV = torch.log_softmax(teacher.head(hidden_KH).float() / temperatures_K[:, None], dim=-1)
            return divergence(torch.log_softmax(logits_KV.float() / temperatures_K[:, None], -1), told_KV, self.config)

        return compare
