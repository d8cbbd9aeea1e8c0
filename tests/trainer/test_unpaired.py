"""KTO's loss: its derivatives are finite differences, the weights weigh, and what is out of range is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import UserError
from mettle.trainer.unpaired import Answers, UnpairedLoss, divergence_of


def twin(policy, reference, is_good, z, form):
    """A formula at a time, as the paper writes it."""
    losses = []
    for s, r, good in zip(policy, reference, is_good, strict=True):
        gain = form.beta * ((s - r - z) if good else (z - (s - r)))
        losses.append((form.desirable if good else form.undesirable) * (1 - 1 / (1 + np.exp(-gain))))
    return np.mean(losses)


@given(seed=st.integers(0, 10**6), beta=st.sampled_from([0.05, 0.1, 1.0]), weight=st.sampled_from([0.0, 0.7, 1.3]))
def test_the_loss_equals_its_twin_and_its_derivatives_are_finite_differences(seed, beta, weight):
    rng = np.random.default_rng(seed)
    policy, reference = rng.normal(-20, 3, (2, 6))
    is_good, form = rng.random(6) < 0.5, UnpairedLoss(beta, 1.0, weight)
    z = divergence_of(policy, reference)
    found = form.of(Answers(policy, reference, is_good, z))
    assert found.loss == pytest.approx(twin(policy, reference, is_good, z, form), rel=1e-12)
    for i in range(6):
        moved = policy + 1e-6 * (np.arange(6) == i)
        slope = (twin(moved, reference, is_good, z, form) - found.loss) / 1e-6
        assert found.by_sum[i] == pytest.approx(slope, abs=1e-6)
    assert (found.by_sum[is_good] <= 0).all()
    assert (found.by_sum[~is_good] >= 0).all()


def test_a_policy_that_is_its_reference_has_half_the_loss_and_no_divergence():
    sums = np.array([-3.0, -5.0])
    assert divergence_of(sums, sums) == 0.0
    assert divergence_of(sums - 1, sums) == 0.0, "an estimate below 0 counts as 0"
    assert UnpairedLoss().of(Answers(sums, sums, np.array([True, False]), 0.0)).loss == 0.5


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"desirable": -1.0}, {"desirable": 0.0, "undesirable": 0.0}])
def test_what_would_train_nothing_is_refused(options):
    with pytest.raises(UserError, match=r"above 0|at least 0"):
        UnpairedLoss(**options)
