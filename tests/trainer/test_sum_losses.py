"""Each loss of the service against a loop that says its formula, its gradient by finite differences, and bad options."""

import math

import numpy as np
import pytest
import torch

from mettle.records.tokens import filled
from mettle.trainer.layout import Targets
from mettle.trainer.loss import TargetTensors
from mettle.trainer.sum_losses import SUM_LOSSES, make_sum_loss

SEQUENCES = np.array([0, 0, 0, 1, 1, 1, 1])
OPTIONS = {
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2},
}


def drawn(seed):
    """(p, q, A, w, mask) of seven targets in two data, ratios on both sides of every bound among them."""
    rng = np.random.default_rng(seed)
    p, q = -rng.uniform(0.1, 2, 7), -rng.uniform(0.1, 2, 7)
    return p, q, rng.normal(size=7), rng.normal(size=7), np.array([1, 0, 1, 1, 1, 0, 1], bool)


def tensors(q, advantages, weights, mask):
    columns = filled(7, {})
    columns |= {"logprobs": q, "advantages": advantages, "ce_weights": weights, "loss_mask": mask}
    return TargetTensors.of(Targets(sequences=SEQUENCES, **columns), torch.device("cpu"))


def held(ratio, low, high):
    return min(max(ratio, low), high)


FORMULAS = {
    "cross_entropy": lambda p, q, a, w, r, low, high: -w * p,
    "importance_sampling": lambda p, q, a, w, r, low, high: -r * a,
    "ppo": lambda p, q, a, w, r, low, high: -min(r * a, held(r, low, high) * a),
    "cispo": lambda p, q, a, w, r, low, high: -held(r, low, high) * p * a,
    "dro": lambda p, q, a, w, r, low, high: -(p * a - 0.3 / 2 * (p - q) ** 2),
    "gspo": lambda p, q, a, w, r, low, high: -min(r * a, held(r, low, high) * a),
}


def naive(name, p, q, advantages, weights, mask):
    """The loss, target by target."""
    low, high = (OPTIONS.get(name, {}).get(f"clip_{side}_threshold") for side in ("low", "high"))
    total = 0.0
    for k in range(7):
        ratio = math.exp(p[k] - q[k])
        if name == "gspo":
            masked = [i for i in range(7) if SEQUENCES[i] == SEQUENCES[k] and mask[i]]
            ratio = math.exp(sum(p[i] - q[i] for i in masked) / len(masked))
        total += FORMULAS[name](p[k], q[k], advantages[k], weights[k], ratio, low, high)
    return total


def gradient_of(name, p, q, advantages, weights, mask):
    own = torch.from_numpy(p).requires_grad_()
    loss = make_sum_loss(name, OPTIONS.get(name)).terms(own, tensors(q, advantages, weights, mask)).sum()
    loss.backward()
    return loss.item(), own.grad.numpy()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SUM_LOSSES)
def test_a_loss_is_its_formula(name, seed):
    given = drawn(seed)
    assert gradient_of(name, *given)[0] == pytest.approx(naive(name, *given), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_a_gradient_is_that_of_finite_differences(name, seed):
    p, *rest = drawn(seed)
    _, found = gradient_of(name, p, *rest)
    for k in range(7):
        moved = np.eye(7)[k] * 1e-6
        slope = (naive(name, p + moved, *rest) - naive(name, p - moved, *rest)) / 2e-6
        assert found[k] == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_what_carries_no_gradient_is_held_fixed(seed):
    """cispo's weight, and gspo's ratio: their slopes are those of p alone."""
    p, q, advantages, weights, mask = drawn(seed)
    _, found = gradient_of("cispo", p, q, advantages, weights, mask)
    np.testing.assert_allclose(found, -np.clip(np.exp(p - q), 0.5, 1.5) * advantages, rtol=1e-12)
    _, found = gradient_of("gspo", p, q, advantages, weights, mask)
    for k in range(7):
        masked = mask & (SEQUENCES[k] == SEQUENCES)
        s = math.exp((p - q)[masked].mean())
        is_held = (s < 0.9 and advantages[k] < 0) or (s > 1.2 and advantages[k] > 0)
        assert found[k] == pytest.approx(0.0 if is_held else -s * advantages[k], rel=1e-12)


def test_a_token_without_advantage_adds_nothing():
    p, q, _, weights, mask = drawn(0)
    for name in ("importance_sampling", "ppo", "cispo", "gspo"):
        value, found = gradient_of(name, p, q, np.zeros(7), weights, mask)
        assert value == 0
        assert not found.any()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("reinforce", {}, "there is no loss 'reinforce'; there are cross_entropy, importance_sampling"),
        ("ppo", {"clip": 0.2}, "loss 'ppo': clip: .*it takes clip_low_threshold, clip_high_threshold"),
        ("ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold 2.0 is above clip_high_threshold 1.2"),
        ("dro", {"beta": -1}, "loss 'dro': beta: .*greater than or equal to 0"),
        ("cross_entropy", {"weight": 1}, "it takes no options"),
    ],
)
def test_bad_options_are_named(name, options, said):
    with pytest.raises(ValueError, match=said):
        make_sum_loss(name, options)
