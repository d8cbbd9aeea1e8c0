"""The loss against a NumPy twin written from the formulas, its gradient, and what happens at the edges."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.trainer.config import LossConfig
from mettle.trainer.layout import ComponentCounts
from mettle.trainer.loss import SUM_NAMES, TargetTensors, token_logprobs, total_loss


def twin(logprobs, targets, counts, config):
    """The loss of each component, a token at a time, in float64."""
    rl = ce = ref_kl = 0.0
    for i, own in enumerate(logprobs):
        sampler = targets["logprobs"][i]
        ce += -own * targets["ce_weights"][i]
        if not (np.isfinite(sampler) and targets["is_sampled"][i]):
            continue
        k = np.clip(own - sampler, -config.log_ratio_clamp, config.log_ratio_clamp)
        moved, advantage = np.exp(own) - np.exp(sampler), targets["advantages"][i]
        ratio = np.exp(k) if config.ratio == "token" else 1.0
        if config.type == "default":
            is_kept = not (moved > config.mask_high if advantage > 0 else moved < -config.mask_low)
            gain = ratio * advantage * is_kept
        elif config.type == "ipo":
            gain = ratio * advantage * (abs(moved) <= config.ipo_threshold)
        else:
            gain = min(ratio * advantage, np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage)
        rl += targets["rl_weights"][i] * (config.kl_tau * k**2 - config.adv_tau * gain)
        pull = 0.0 if moved < -config.mask_low else (targets["ref_logprobs"][i] - own) * np.exp(k)
        ref_kl += targets["ref_kl_weights"][i] * (config.ref_kl_tau * k**2 - pull)
    return rl / max(1, counts.rl) + ce / max(1, counts.ce) + ref_kl / max(1, counts.ref_kl)


def random_targets(rng, number, *, spread=0.5):
    logprobs = -rng.exponential(1.0, number)
    weights = rng.integers(0, 2, (3, number)) * rng.uniform(0.5, 2, (3, number))
    targets = {
        "labels": np.zeros(number, np.int64),
        "temperatures": np.ones(number),
        "logprobs": np.minimum(logprobs + rng.normal(0, spread, number), 0),
        "advantages": rng.choice([-1.5, 0.0, 0.7], number),
        "is_sampled": rng.random(number) < 0.8,
        "rl_weights": weights[0],
        "ce_weights": weights[1],
        "ref_kl_weights": weights[2],
        "ref_logprobs": -rng.exponential(1.0, number),
    }
    targets["rl_weights"] *= targets["is_sampled"]
    return logprobs, targets


def tensors(targets):
    return TargetTensors(
        *(torch.from_numpy(np.asarray(targets[n.removesuffix("_K")])) for n in TargetTensors.__slots__)
    )


def sums(output):
    return dict(zip(SUM_NAMES, output.sums.tolist(), strict=True))


CONFIGS = [
    LossConfig(),
    LossConfig(mask_low=0.05, mask_high=0.1, adv_tau=0.7, kl_tau=0.3),
    LossConfig(ratio="none", kl_tau=0),
    LossConfig(type="ipo", ipo_threshold=0.05),
    LossConfig(type="ppo_clip", clip_low=0.1, clip_high=0.3),
    LossConfig(log_ratio_clamp=0.4),
]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), config=st.sampled_from(CONFIGS), spread=st.sampled_from([0.0, 0.3, 3.0]))
def test_the_loss_equals_its_numpy_twin(seed, config, spread):
    logprobs, targets = random_targets(np.random.default_rng(seed), 23, spread=spread)
    counts = ComponentCounts(17, 11, 5)
    own = torch.from_numpy(logprobs)
    output = total_loss(own, torch.zeros_like(own), tensors(targets), counts, config)
    assert output.loss.item() == pytest.approx(twin(logprobs, targets, counts, config), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("config", CONFIGS[:5], ids=lambda c: f"{c.type}-{c.ratio}")
def test_the_gradient_is_that_of_the_formula(config):
    # The two stop-gradients (mask, ref - l) make finite differences of the whole loss wrong where they act, so the
    # reference is the published derivative: w (-keep adv_tau A r + 2 kl_tau k) and its kin.
    logprobs, targets = random_targets(np.random.default_rng(5), 41)
    own = torch.from_numpy(logprobs).requires_grad_()
    counts = ComponentCounts(7, 3, 2)
    total_loss(own, torch.zeros_like(own), tensors(targets), counts, config).loss.backward()
    k = np.clip(logprobs - targets["logprobs"], -20, 20)
    moved, advantage = np.exp(logprobs) - np.exp(targets["logprobs"]), targets["advantages"]
    ratio = np.exp(k)
    if config.type == "ppo_clip":
        clipped = np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
        keep = ratio * advantage <= clipped * advantage
    elif config.type == "ipo":
        keep = np.abs(moved) <= config.ipo_threshold
    else:
        keep = np.where(advantage > 0, moved <= config.mask_high, moved >= -config.mask_low)
    weight = 1.0 if config.ratio == "none" else ratio
    known = targets["is_sampled"]
    rl = targets["rl_weights"] * known * (2 * config.kl_tau * k - keep * config.adv_tau * advantage * weight)
    pull = (targets["ref_logprobs"] - logprobs) * ratio * (moved >= -config.mask_low)
    ref_kl = targets["ref_kl_weights"] * known * (2 * config.ref_kl_tau * k - pull)
    expected = rl / 7 - targets["ce_weights"] / 3 + ref_kl / 2
    np.testing.assert_allclose(own.grad.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_gradcheck_where_the_loss_is_smooth():
    logprobs, targets = random_targets(np.random.default_rng(2), 9, spread=0.01)
    targets["ref_kl_weights"][:] = 0
    own = torch.from_numpy(logprobs).requires_grad_()
    config, counts = LossConfig(mask_low=0.9, mask_high=0.9), ComponentCounts(4, 4, 4)

    def loss(values):
        return total_loss(values, torch.zeros_like(values), tensors(targets), counts, config).loss

    assert torch.autograd.gradcheck(loss, (own,))


def test_two_halves_add_up_to_the_whole():
    logprobs, targets = random_targets(np.random.default_rng(3), 30)
    counts = ComponentCounts(12, 9, 8)

    def part(chosen):
        own = torch.from_numpy(logprobs[chosen])
        some = {name: value[chosen] for name, value in targets.items()}
        output = total_loss(own, own * 0 + 1, tensors(some), counts, LossConfig())
        return output.loss, output.sums

    whole, first, rest = part(slice(None)), part(slice(0, 11)), part(slice(11, None))
    torch.testing.assert_close(first[0] + rest[0], whole[0])
    torch.testing.assert_close(first[1] + rest[1], whole[1])


def test_a_runaway_ratio_is_cut_counted_and_has_no_gradient():
    _, targets = random_targets(np.random.default_rng(0), 3)
    targets |= {
        "logprobs": np.array([-100.0, -1.0, -0.5]),
        "advantages": np.ones(3),
        "is_sampled": np.ones(3, bool),
        "rl_weights": np.ones(3),
        "ce_weights": np.zeros(3),
        "ref_kl_weights": np.zeros(3),
    }
    own = torch.tensor([-5.0, -1.1, -0.6], dtype=torch.float64, requires_grad=True)
    output = total_loss(own, torch.zeros(3), tensors(targets), ComponentCounts(3, 0, 0), LossConfig(kl_tau=0))
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert own.grad[0] == 0
    assert (own.grad[1:] != 0).all()
    assert sums(output)["num_clamped"] == 1


@pytest.mark.parametrize("bad", [-np.inf, np.nan, np.inf])
def test_a_token_without_a_sampler_logprob_trains_nothing_and_is_counted(bad):
    logprobs, targets = random_targets(np.random.default_rng(1), 4)
    targets |= {
        "is_sampled": np.ones(4, bool),
        "rl_weights": np.ones(4),
        "ref_kl_weights": np.ones(4),
        "ce_weights": np.zeros(4),
    }
    targets["logprobs"][2] = bad
    own = torch.from_numpy(logprobs).requires_grad_()
    output = total_loss(own, torch.zeros(4), tensors(targets), ComponentCounts(4, 1, 4), LossConfig())
    output.loss.backward()
    assert own.grad[2] == 0
    assert torch.isfinite(own.grad).all()
    assert sums(output)["num_non_finite"] == 1
    assert sums(output)["num_sampled"] == 3


def test_mismatch_is_k3_over_sampled_tokens_of_rl_and_ref_kl():
    logprobs, targets = random_targets(np.random.default_rng(4), 50, spread=0.1)
    own = torch.from_numpy(logprobs)
    output = total_loss(own, torch.zeros_like(own), tensors(targets), ComponentCounts(1, 1, 1), LossConfig())
    chosen = targets["is_sampled"] & ((targets["rl_weights"] != 0) | (targets["ref_kl_weights"] != 0))
    k = (logprobs - targets["logprobs"])[chosen]
    assert sums(output)["num_sampled"] == chosen.sum()
    assert sums(output)["mismatch_kl"] == pytest.approx((np.exp(k) - k - 1).sum())
    assert output.max_mismatch_kl.item() == pytest.approx((np.exp(k) - k - 1).max())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_and_entropy_are_those_at_the_sampling_temperature(temperature):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 3, (6, 11)), rng.integers(0, 11, 6)
    scaled = np.exp(logits / temperature)
    probabilities = scaled / scaled.sum(-1, keepdims=True)
    found, entropy = token_logprobs(torch.from_numpy(logits), torch.from_numpy(labels), torch.full((6,), temperature))
    np.testing.assert_allclose(found.numpy(), np.log(probabilities[np.arange(6), labels]), rtol=1e-5)
    np.testing.assert_allclose(entropy.numpy(), -(probabilities * np.log(probabilities)).sum(-1), rtol=1e-5)
