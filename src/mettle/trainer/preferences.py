"""Losses of preference pairs: what a step makes of chosen and rejected answers. Pure functions, no torch.

Every loss here depends on the log-probabilities of whole answers alone, so its gradient is one number an answer: how
much its sum of log-probabilities is to change. A step finds the sums by a forward pass, asks `PreferenceLoss.of` for
those numbers, and trains them as weights of a cross-entropy (`preference_tuning`): exact, and blind to how the answers
are packed. For a pair with sums S+ and S- over n+ and n- tokens, reference sums R+ and R-, D = (S+ - R+) - (S- - R-):

    dpo    -(1 - e) log sig(beta D) - e log sig(-beta D)       e = label_smoothing; arXiv 2305.18290, cDPO for e > 0
    ipo    (D - 1 / (2 beta))^2                                arXiv 2310.12036
    simpo  -log sig(beta (S+ / n+ - S- / n-) - margin)         no reference; arXiv 2405.14734 (beta 2, margin 1)
    orpo   -S+ / n+ - beta log sig(o(S+ / n+) - o(S- / n-))    o(m) = m - log(1 - e^m), no reference; arXiv 2403.07691

Each is the mean over the pairs of a step. Checked against finite differences and autograd in tests/trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mettle.errors import UserError

Values = NDArray[np.float64]

DEFAULT_BETA = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1}
"""By loss: the strength that its paper recommends."""
WITHOUT_REFERENCE = frozenset({"simpo", "orpo"})
_LEAST_ODDS = 1e-12


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs: [P] sums of log-probabilities of the answers under the policy and the reference, and their tokens."""

    chosen: Values
    rejected: Values
    reference_chosen: Values
    reference_rejected: Values
    num_chosen: Values
    num_rejected: Values


@dataclass(frozen=True, slots=True)
class PreferenceStep:
    """The mean `loss`, its derivatives [P] by the sums, and [P] by how much the chosen answer is preferred."""

    loss: float
    by_chosen: Values
    by_rejected: Values
    margins: Values


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """One of the losses above. `beta` None is what the loss's paper recommends."""

    name: str = "dpo"
    beta: float | None = None
    label_smoothing: float = 0.0
    margin: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in DEFAULT_BETA:
            raise UserError(f"there is no preference loss {self.name!r}; there are {', '.join(DEFAULT_BETA)}")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise UserError(f"label smoothing is from 0 to below .5, not {self.label_smoothing:g}")
        if self.label_smoothing and self.name != "dpo":
            raise UserError(f"label smoothing is an option of dpo, not of {self.name}")
        if not self.strength > 0:
            raise UserError(f"beta is above 0, not {self.strength:g}")

    @property
    def strength(self) -> float:
        """Beta."""
        return DEFAULT_BETA[self.name] if self.beta is None else self.beta

    @property
    def has_reference(self) -> bool:
        """Whether the reference's sums are read."""
        return self.name not in WITHOUT_REFERENCE

    def of(self, pairs: Pairs) -> PreferenceStep:
        """The loss of some pairs, and its derivatives."""
        losses, by_chosen, by_rejected, margins = getattr(self, f"_{self.name}")(pairs)
        count = len(losses)
        return PreferenceStep(float(losses.mean()), by_chosen / count, by_rejected / count, margins)

    def _dpo(self, pairs: Pairs) -> tuple[Values, Values, Values, Values]:
        margins = self.strength * _difference(pairs)
        smooth = self.label_smoothing
        losses = (1 - smooth) * _softplus(-margins) + smooth * _softplus(margins)
        slope = self.strength * (_sigmoid(margins) - (1 - smooth))
        return losses, slope, -slope, margins

    def _ipo(self, pairs: Pairs) -> tuple[Values, Values, Values, Values]:
        difference = _difference(pairs)
        over = difference - 1 / (2 * self.strength)
        return over**2, 2 * over, -2 * over, difference

    def _simpo(self, pairs: Pairs) -> tuple[Values, Values, Values, Values]:
        margins = self.strength * (pairs.chosen / pairs.num_chosen - pairs.rejected / pairs.num_rejected)
        slope = self.strength * (_sigmoid(margins - self.margin) - 1)
        return _softplus(self.margin - margins), slope / pairs.num_chosen, -slope / pairs.num_rejected, margins

    def _orpo(self, pairs: Pairs) -> tuple[Values, Values, Values, Values]:
        good, bad = pairs.chosen / pairs.num_chosen, pairs.rejected / pairs.num_rejected
        good_rest, bad_rest = (np.maximum(-np.expm1(mean), _LEAST_ODDS) for mean in (good, bad))
        margins = (good - np.log(good_rest)) - (bad - np.log(bad_rest))
        slope = self.strength * (_sigmoid(margins) - 1)
        losses = -good + self.strength * _softplus(-margins)
        by_chosen = (slope / good_rest - 1) / pairs.num_chosen
        return losses, by_chosen, -slope / bad_rest / pairs.num_rejected, margins


def _difference(pairs: Pairs) -> Values:
    return (pairs.chosen - pairs.reference_chosen) - (pairs.rejected - pairs.reference_rejected)


def _sigmoid(values: Values) -> Values:
    return np.exp(-np.logaddexp(0.0, -values))


def _softplus(values: Values) -> Values:
    """log(1 + e^x), which is -log sig(-x)."""
    return np.logaddexp(0.0, values)
