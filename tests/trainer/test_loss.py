"""The loss against NumPy twins written from the formulas, its gradient, and what happens at the edges.

The tests of every loss go over the registry: one without a twin here fails.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.trainer.layout import ComponentCounts
from mettle.trainer.loss import SUM_NAMES, BatchLoss, TargetTensors, token_logprobs, total_loss
from mettle.trainer.losses import LOSSES, make_loss
from mettle.trainer.losses.default import DefaultLoss

# Twins: (value, d/d own logprob) of a token's surrogate, from `own` logprob, `sampler`'s, cut log-ratio `k`, `advantage`,
# and the cut log-ratios `mates` of all members of its sequence.


def default_twin(form, own, sampler, k, advantage, mates):
    moved, ratio = np.exp(own) - np.exp(sampler), np.exp(k)
    is_kept = not (moved > form.mask_high if advantage > 0 else moved < -form.mask_low)
    return ratio * advantage * is_kept, ratio * advantage * is_kept


def ipo_twin(form, own, sampler, k, advantage, mates):
    moved, ratio = np.exp(own) - np.exp(sampler), np.exp(k)
    return (ratio * advantage * (abs(moved) <= form.ipo_threshold),) * 2


def clipped(form, ratio, advantage):
    free, cut = ratio * advantage, np.clip(ratio, 1 - form.clip_low, 1 + form.clip_high) * advantage
    return min(free, cut), free if free <= cut else 0.0


def level_ratio(form, k, mates):
    cut = form.log_ratio_clamp
    return np.exp({"token": k, "sequence": np.clip(mates.sum(), -cut, cut), "geometric": mates.mean()}[form.level])


def ppo_clip_twin(form, own, sampler, k, advantage, mates):
    return clipped(form, level_ratio(form, k, mates), advantage)


def gspo_twin(form, own, sampler, k, advantage, mates):
    return clipped(form, np.exp(mates.mean()), advantage)


def cispo_twin(form, own, sampler, k, advantage, mates):
    weight = np.clip(np.exp(k), 1 - form.clip_low, 1 + form.clip_high)
    return weight * advantage * own, weight * advantage


def truncated_is_twin(form, own, sampler, k, advantage, mates):
    weight = min(level_ratio(form, k, mates), form.cap)
    return weight * advantage * own, weight * advantage


def masked_is_twin(form, own, sampler, k, advantage, mates):
    ratios = np.exp(mates)
    seen = {"token": np.exp(k), "sequence": ratios.prod(), "geometric": ratios.prod() ** (1 / len(ratios))}
    is_kept = form.max_token_ratio is None or ratios.max() <= form.max_token_ratio
    for name, value in seen.items():
        low, high = getattr(form, f"{name}_low"), getattr(form, f"{name}_high")
        is_kept &= (low is None or value >= low) and (high is None or value <= high)
    weight = min(level_ratio(form, k, mates), np.inf if form.cap is None else form.cap) * is_kept
    return weight * advantage * own, weight * advantage


def importance_sampling_twin(form, own, sampler, k, advantage, mates):
    return (np.exp(k) * advantage,) * 2


def dro_twin(form, own, sampler, k, advantage, mates):
    return advantage * own, advantage


TWINS = {
    "default": default_twin,
    "ipo": ipo_twin,
    "ppo_clip": ppo_clip_twin,
    "gspo": gspo_twin,
    "cispo": cispo_twin,
    "truncated_is": truncated_is_twin,
    "masked_is": masked_is_twin,
    "importance_sampling": importance_sampling_twin,
    "dro": dro_twin,
}


def has_ratio_gradient(form):
    """True where a cut log-ratio has no gradient: losses in which the token's own ratio is what is differentiated."""
    return form.type in ("default", "ipo", "importance_sampling") or (form.type == "ppo_clip" and form.level == "token")


def penalty_twin(form, k):
    """(value, slope) of what leaving the sampler costs."""
    return (np.exp(k) - k - 1, np.exp(k) - 1) if form.kl == "k3" else (k**2, 2 * k)


def twin(logprobs, targets, counts, form):
    """The loss, and its gradient, a token at a time, in float64."""
    raw = np.where(targets["is_compared"], logprobs - targets["logprobs"], 0.0)
    log_ratios = np.clip(raw, -form.log_ratio_clamp, form.log_ratio_clamp)
    loss, gradient = 0.0, np.zeros(len(logprobs))
    for i, own in enumerate(logprobs):
        k, flows = log_ratios[i], abs(raw[i]) <= form.log_ratio_clamp
        if (weight := targets["rl_weights"][i] / max(1, counts.rl)) != 0:
            mates = (targets["sequences"] == targets["sequences"][i]) & (targets["rl_weights"] != 0)
            has_ratio = form.ratio == "token"
            value, slope = TWINS[form.type](
                form,
                own,
                targets["logprobs"][i],
                k * has_ratio,
                targets["advantages"][i],
                log_ratios[mates] * has_ratio,
            )
            if has_ratio_gradient(form) and has_ratio:
                slope *= flows
            cost, rise = penalty_twin(form, k)
            loss += weight * (form.kl_tau * cost - form.adv_tau * value)
            gradient[i] += weight * (form.kl_tau * rise * flows - form.adv_tau * slope)
        if (weight := targets["ref_kl_weights"][i] / max(1, counts.ref_kl)) != 0:
            is_kept = np.exp(own) - np.exp(targets["logprobs"][i]) >= -form.mask_low
            pull = (targets["ref_logprobs"][i] - own) * np.exp(k) * is_kept
            cost, rise = penalty_twin(form, k)
            loss += weight * (form.ref_kl_tau * cost - pull)
            gradient[i] += weight * (form.ref_kl_tau * rise - pull) * flows
        loss -= own * targets["ce_weights"][i] / max(1, counts.ce)
        gradient[i] -= targets["ce_weights"][i] / max(1, counts.ce)
    return loss, gradient


def random_targets(rng, number, *, spread=0.5):
    """Columns as a layout leaves them: what is compared was sampled, and the rest has no weight in rl and ref_kl."""
    logprobs = -rng.exponential(1.0, number)
    weights = rng.integers(0, 2, (3, number)) * rng.uniform(0.5, 2, (3, number))
    targets = {
        "token_ids": np.zeros(number, np.int64),
        "temperatures": np.ones(number),
        "logprobs": np.minimum(logprobs + rng.normal(0, spread, number), 0),
        "advantages": rng.choice([-1.5, 0.0, 0.7], number),
        "loss_mask": rng.random(number) < 0.8,
        "rl_weights": weights[0],
        "ce_weights": weights[1],
        "ref_kl_weights": weights[2],
        "ref_logprobs": -rng.exponential(1.0, number),
        "versions": np.zeros(number, np.int32),
        "distill_weights": np.zeros(number),
        "teacher_ids": np.zeros((number, 0), np.int64),
        "teacher_logprobs": np.zeros((number, 0)),
        "experts": np.zeros((number, 0), np.int16),
    }
    targets["rl_weights"] *= targets["loss_mask"]
    targets["ref_kl_weights"] *= targets["loss_mask"]
    targets["sequences"] = np.sort(rng.integers(0, max(1, number // 5), number))
    targets["is_compared"] = (targets["rl_weights"] != 0) | (targets["ref_kl_weights"] != 0)
    return logprobs, targets


def tensors(targets):
    return TargetTensors(**{n: torch.from_numpy(np.asarray(v)) for n, v in targets.items() if n != "is_compared"})


def sums(output):
    return dict(zip(SUM_NAMES, output.sums.tolist(), strict=True))


OPTIONS = {
    "default": [
        {},
        {"mask_low": 0.05, "mask_high": 0.1, "adv_tau": 0.7, "kl_tau": 0.3},
        {"ratio": "none", "kl_tau": 0},
    ],
    "ipo": [{"ipo_threshold": 0.05}],
    "ppo_clip": [
        {"clip_low": 0.1, "clip_high": 0.3},
        {"level": "sequence", "clip_low": 0.4, "clip_high": 0.8},
        {"level": "geometric", "clip_high": 0.1},
    ],
    "truncated_is": [{"level": "sequence", "cap": 1.3}, {"level": "geometric", "cap": 1.05}],
    "masked_is": [
        {"token_low": 0.6, "token_high": 1.5, "geometric_low": None, "geometric_high": None},
        {"level": "sequence", "cap": 3.0, "sequence_low": 0.5, "sequence_high": 2.0, "token_low": None},
        {"level": "geometric", "geometric_low": 0.9, "geometric_high": 1.1, "max_token_ratio": 1.4},
    ],
    "gspo": [{"clip_low": 0.1, "clip_high": 0.2}],
}
FORMS = [
    make_loss(name, options)
    for name in LOSSES.names()
    for options in [
        *OPTIONS.get(name, []),
        {},
        {"log_ratio_clamp": 0.4},
        {"ratio": "none"},
        {"kl": "k3", "kl_tau": 0.3},
    ]
]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), form=st.sampled_from(FORMS), spread=st.sampled_from([0.0, 0.3, 3.0]))
def test_the_loss_and_its_gradient_equal_their_numpy_twin(seed, form, spread):
    # Some factors carry no gradient (masks, ref - l, the weight of CISPO), so the reference is the published derivative.
    logprobs, targets = random_targets(np.random.default_rng(seed), 23, spread=spread)
    counts = ComponentCounts(17, 11, 5)
    own = torch.from_numpy(logprobs).requires_grad_()
    output = total_loss(own, torch.zeros_like(own), tensors(targets), counts, form)
    output.loss.backward()
    loss, gradient = twin(logprobs, targets, counts, form)
    assert output.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(own.grad.numpy(), gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", json.loads((Path(__file__).parent / "pinned.json").read_text())["losses"])
def test_the_first_three_losses_give_the_numbers_that_they_gave_when_they_were_one_function(case):
    options = dict(case["config"])
    form = make_loss(options.pop("type", "default"), options)
    logprobs, targets = random_targets(np.random.default_rng(21), 37, spread=0.4)
    own = torch.from_numpy(logprobs).requires_grad_()
    output = total_loss(own, torch.zeros_like(own), tensors(targets), ComponentCounts(17, 11, 5), form)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-12)
    np.testing.assert_allclose(own.grad.numpy(), case["gradient"], rtol=1e-12)
    for name, value in sums(output).items():
        assert value == pytest.approx(case["sums"].get(name, 0.0), rel=1e-12), name


def test_gradcheck_where_the_loss_is_smooth():
    logprobs, targets = random_targets(np.random.default_rng(2), 9, spread=0.01)
    targets["ref_kl_weights"][:] = 0
    own = torch.from_numpy(logprobs).requires_grad_()
    config, counts = DefaultLoss(mask_low=0.9, mask_high=0.9), ComponentCounts(4, 4, 4)

    def loss(values):
        return total_loss(values, torch.zeros_like(values), tensors(targets), counts, config).loss

    assert torch.autograd.gradcheck(loss, (own,))


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.type)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_passes_add_up_and_neither_their_order_nor_their_cut_matters(form, seed):
    rng = np.random.default_rng(seed)
    logprobs, targets = random_targets(rng, 30)
    counts = ComponentCounts(12, 9, 8)

    def part(chosen):
        own = torch.from_numpy(logprobs[chosen]).requires_grad_()
        some = {name: value[chosen] for name, value in targets.items()}
        some["sequences"] = np.unique(some["sequences"], return_inverse=True)[1]
        output = total_loss(own, own.detach() * 0 + 1, tensors(some), counts, form)
        output.loss.backward()
        gradient = torch.zeros(30, dtype=torch.float64)
        gradient[torch.from_numpy(chosen)] = own.grad
        return output.loss.detach(), output.sums, gradient

    whole = part(np.arange(30))
    is_first = rng.permutation(6)[targets["sequences"]] < 3  # whole sequences, as a layout cuts them
    halves = [part(rng.permutation(np.flatnonzero(half))) for half in (is_first, ~is_first)]
    for found, expected in zip(zip(*halves, strict=True), whole, strict=True):
        torch.testing.assert_close(sum(found), expected)


@pytest.mark.parametrize("name", LOSSES.names())
def test_no_advantage_means_no_gradient_but_that_of_the_penalty(name):
    logprobs, targets = random_targets(np.random.default_rng(3), 30)
    targets |= {"advantages": np.zeros(30), "ce_weights": np.zeros(30), "ref_kl_weights": np.zeros(30)}
    own = torch.from_numpy(logprobs).requires_grad_()
    total_loss(
        own, own.detach(), tensors(targets), ComponentCounts(9, 1, 1), make_loss(name, {"kl_tau": 0})
    ).loss.backward()
    assert not own.grad.any()


@pytest.mark.parametrize("name", LOSSES.names())
def test_without_lag_every_loss_is_the_plain_policy_gradient(name):
    logprobs, targets = random_targets(np.random.default_rng(4), 30, spread=0.0)
    targets |= {"ce_weights": np.zeros(30), "ref_kl_weights": np.zeros(30)}
    targets["logprobs"] = logprobs.copy()
    own = torch.from_numpy(logprobs).requires_grad_()
    total_loss(own, own.detach(), tensors(targets), ComponentCounts(7, 1, 1), make_loss(name, {})).loss.backward()
    np.testing.assert_allclose(own.grad.numpy(), -targets["rl_weights"] * targets["advantages"] / 7, atol=1e-15)


def test_bounds_that_cross_and_bounds_of_nothing_are_refused():
    with pytest.raises(ValueError, match=r"token_low 2 is above token_high 1"):
        make_loss("masked_is", {"token_low": 2.0, "token_high": 1.0})
    with pytest.raises(ValueError, match="level"):
        make_loss("truncated_is", {"level": "word"})


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_loss_in_which_no_reward_counts_is_refused(name):
    with pytest.raises(ValueError, match="adv_tau: Input should be greater than 0"):
        make_loss(name, {"adv_tau": 0})


def test_one_token_far_off_takes_its_whole_sequence_with_it():
    number = 6
    _, targets = random_targets(np.random.default_rng(0), number)
    targets |= {
        "sequences": np.array([0, 0, 0, 1, 1, 1]), "logprobs": np.array([-1.0, -1.0, -3.0, -1.0, -1.0, -1.0]),
        "advantages": np.ones(number), "loss_mask": np.ones(number, bool), "rl_weights": np.ones(number),
        "ce_weights": np.zeros(number), "ref_kl_weights": np.zeros(number),
    }  # fmt: skip
    own = torch.full((number,), -1.0, dtype=torch.float64, requires_grad=True)
    form = make_loss("masked_is", {"max_token_ratio": 5.0, "kl_tau": 0})
    output = total_loss(own, own.detach(), tensors(targets), ComponentCounts(6, 0, 0), form)
    output.loss.backward()
    assert own.grad.tolist() == [0, 0, 0, *[-1 / 6] * 3]  # what is held back stays in the count
    assert sums(output)["num_masked"] == 3


def test_a_sequence_far_from_its_sampler_is_held_back_whole_by_gspo():
    number = 6
    _, targets = random_targets(np.random.default_rng(0), number)
    targets |= {
        "sequences": np.array([0, 0, 0, 1, 1, 1]),
        "logprobs": np.array([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0]),
        "advantages": np.ones(number),
        "loss_mask": np.ones(number, bool),
        "rl_weights": np.ones(number),
        "ce_weights": np.zeros(number),
        "ref_kl_weights": np.zeros(number),
    }
    own = torch.tensor([-0.9, -1.0, -1.0, -0.9, -1.05, -1.05], dtype=torch.float64, requires_grad=True)
    form = make_loss("gspo", {"clip_low": 0.01, "clip_high": 0.01, "kl_tau": 0})
    output = total_loss(own, own.detach(), tensors(targets), ComponentCounts(6, 0, 0), form)
    output.loss.backward()
    assert own.grad[:3].tolist() == [0, 0, 0]  # mean log-ratio .033
    assert (own.grad[3:] < 0).all()  # mean log-ratio 0, though its first token moved as far
    assert sums(output)["num_masked"] == 3


def test_a_runaway_ratio_is_cut_counted_and_has_no_gradient():
    _, targets = random_targets(np.random.default_rng(0), 3)
    targets |= {
        "logprobs": np.array([-100.0, -1.0, -0.5]),
        "advantages": np.ones(3),
        "loss_mask": np.ones(3, bool),
        "rl_weights": np.ones(3),
        "ce_weights": np.zeros(3),
        "ref_kl_weights": np.zeros(3),
    }
    own = torch.tensor([-5.0, -1.1, -0.6], dtype=torch.float64, requires_grad=True)
    output = total_loss(own, torch.zeros(3), tensors(targets), ComponentCounts(3, 0, 0), DefaultLoss(kl_tau=0))
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert own.grad[0] == 0
    assert (own.grad[1:] != 0).all()
    assert sums(output)["num_clamped"] == 1


def test_mismatch_is_k3_over_sampled_tokens_of_rl_and_ref_kl():
    logprobs, targets = random_targets(np.random.default_rng(4), 50, spread=0.1)
    own = torch.from_numpy(logprobs)
    output = total_loss(own, torch.zeros_like(own), tensors(targets), ComponentCounts(1, 1, 1), DefaultLoss())
    chosen = targets["is_compared"]
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


def test_the_entropy_bonus_has_the_gradient_of_the_entropy_and_only_where_it_is_asked_for():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (6, 11))).requires_grad_()
    labels, ones = torch.from_numpy(rng.integers(0, 11, 6)), torch.ones(6)
    _, silent = token_logprobs(logits, labels, ones)
    assert not silent.requires_grad
    _, targets = random_targets(rng, 6)
    targets |= {"rl_weights": np.array([1.0, 2, 0, 0, 1, 1]), "advantages": np.zeros(6), "ref_kl_weights": np.zeros(6)}
    targets |= {"ce_weights": np.zeros(6)}
    own, entropy = token_logprobs(logits, labels, ones, has_entropy_gradient=True)
    form = DefaultLoss(kl_tau=0, entropy_tau=0.3)
    output = total_loss(own, entropy, tensors(targets), ComponentCounts(4, 0, 0), form)
    weights = torch.from_numpy(targets["rl_weights"])
    assert output.loss.item() == pytest.approx(-0.3 * (weights * entropy).sum().item() / 4)
    output.loss.backward()
    # d H / d z_v = -p_v (log p_v + H)
    p = torch.softmax(logits.detach().float(), -1)
    entropy = entropy.detach()
    expected = 0.3 / 4 * weights[:, None] * p * (p.log() + entropy[:, None])
    torch.testing.assert_close(logits.grad, expected.double(), rtol=1e-4, atol=1e-6)


def test_each_component_is_divided_by_its_own_count_and_by_no_less_than_one():
    logprobs, targets = random_targets(np.random.default_rng(3), 20)
    own = torch.from_numpy(logprobs)

    def loss(*counts):
        return total_loss(own, torch.zeros_like(own), tensors(targets), ComponentCounts(*counts), DefaultLoss())

    parts = sums(loss(1, 1, 1))
    assert min(abs(parts[name]) for name in ("rl", "ce", "ref_kl")) > 0.01
    for counts in ((1, 1, 1), (0, 0, 0), (2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 5, 8)):
        rl, ce, ref_kl = (max(1, count) for count in counts)
        expected = parts["rl"] / rl + parts["ce"] / ce + parts["ref_kl"] / ref_kl
        assert loss(*counts).loss.item() == pytest.approx(expected)


def test_a_teachers_divergence_is_weighted_and_divided_by_the_number_of_its_tokens():
    logprobs, targets = random_targets(np.random.default_rng(3), 6)
    targets["distill_weights"] = np.array([0.0, 1.0, 0.5, 2.0, 0.0, 1.5])
    own, divergences = torch.from_numpy(logprobs), torch.tensor([9.0, 0.5, 3.0, 0.25, 9.0, 1.0], dtype=torch.float64)

    def loss(number, divergence_K):
        counts = ComponentCounts(1, 1, 1, distill=number)
        return total_loss(own, torch.zeros_like(own), tensors(targets), counts, DefaultLoss(), divergence_K)

    without = loss(4, None)
    assert sums(without)["distill"] == 0.0
    for number in (0, 1, 4):
        found = loss(number, divergences)
        assert sums(found)["distill"] == pytest.approx(4.0)
        assert found.loss.item() - without.loss.item() == pytest.approx(4.0 / max(1, number))


@pytest.mark.parametrize("number", [0, 1, 7])
def test_a_batch_says_what_its_loss_needs(number):
    batch_loss = BatchLoss(DefaultLoss(entropy_tau=number / 100), ComponentCounts(5, 0, 0, distill=number))
    assert (batch_loss.has_entropy, batch_loss.has_teacher) == (number > 0, number > 0)


def test_a_pass_without_tokens_adds_nothing():
    _, targets = random_targets(np.random.default_rng(0), 0)
    none = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    output = total_loss(none, none.detach(), tensors(targets), ComponentCounts(3, 3, 3), DefaultLoss())
    assert output.loss.item() == 0.0
    assert output.sums.tolist() == [0.0] * len(SUM_NAMES)
    assert output.max_mismatch_kl.item() == 0.0


@pytest.mark.parametrize(("sampler", "num_clamped"), [(-1.5, 0), (-1.5000001, 1), (-0.5, 0), (-0.4999999, 1)])
def test_a_ratio_at_the_limit_is_not_yet_cut(sampler, num_clamped):
    _, targets = random_targets(np.random.default_rng(0), 1)
    targets |= {
        "logprobs": np.array([sampler]), "rl_weights": np.ones(1), "ce_weights": np.zeros(1),
        "ref_kl_weights": np.zeros(1), "loss_mask": np.ones(1, bool),
    }  # fmt: skip
    own, form = torch.tensor([-1.0], dtype=torch.float64), DefaultLoss(log_ratio_clamp=0.5)
    output = total_loss(own, torch.zeros(1), tensors(targets), ComponentCounts(1, 0, 0), form)
    assert sums(output)["num_clamped"] == num_clamped
