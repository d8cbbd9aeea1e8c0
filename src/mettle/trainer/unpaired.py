"""KTO: the loss of answers that are each just good or bad, without a pair. Pure functions, no torch.

With S and R an answer's sums of log-probabilities under the policy and the reference, r = S - R its implied reward and
z the policy's divergence from the reference, estimated without gradient (below):

    good   desirable (1 - sig(beta (r - z)))          bad   undesirable (1 - sig(beta (z - r)))

and the loss is the mean over the answers of a step. z = max(0, mean of S - R over answers that don't belong to their
prompts): each prompt with the answer of the next line of the file, so that the reference's part is computed once. The
two weights even out unequal numbers: with n_g good and n_b bad ones the paper wants desirable n_g / (undesirable n_b)
between 1 and 4/3. Source: arXiv 2402.01306. Like `preferences`, its gradient is one number an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mettle.errors import UserError
from mettle.records.tokens import BoolArray
from mettle.trainer.preferences import Values


@dataclass(frozen=True, slots=True)
class Answers:
    """E answers: [E] sums under policy and reference, [E] whether each is good, and `baseline`, the z above."""

    policy: Values
    reference: Values
    is_good: BoolArray
    baseline: float


@dataclass(frozen=True, slots=True)
class UnpairedStep:
    """The mean `loss`, its derivatives [E] by the policy's sums, and [E] the rewards r."""

    loss: float
    by_sum: Values
    rewards: Values


@dataclass(frozen=True, slots=True)
class UnpairedLoss:
    """KTO. `beta` is the strength, the others weigh good and bad answers."""

    beta: float = 0.1
    desirable: float = 1.0
    undesirable: float = 1.0

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise UserError(f"beta is above 0, not {self.beta:g}")
        if min(self.desirable, self.undesirable) < 0 or not self.desirable + self.undesirable:
            raise UserError(
                f"the weights of good and bad answers are at least 0, and one of them is above it; "
                f"not {self.desirable:g} and {self.undesirable:g}"
            )

    def of(self, answers: Answers) -> UnpairedStep:
        """The loss of some answers, and its derivatives."""
        rewards = answers.policy - answers.reference
        sign: NDArray[np.float64] = np.where(answers.is_good, 1.0, -1.0)
        weights = np.where(answers.is_good, self.desirable, self.undesirable)
        value = 1 / (1 + np.exp(-np.clip(sign * self.beta * (rewards - answers.baseline), -500, 500)))
        slopes = -weights * sign * self.beta * value * (1 - value)
        return UnpairedStep(float((weights * (1 - value)).mean()), slopes / len(rewards), rewards)


def divergence_of(policy: Values, reference: Values) -> float:
    """z, from the sums of answers under prompts that aren't theirs."""
    return max(0.0, float((policy - reference).mean()))
