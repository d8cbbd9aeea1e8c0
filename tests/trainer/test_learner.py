"""One step: schedules, clipping, precision, metrics; and the numbers of the trainer before losses were a registry."""

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.trainer.conftest import ALONE, gradients, make_batch, make_group, make_learner, make_recipe, make_sample

import mettle
from mettle.errors import UserError
from mettle.trainer.config import (
    OptimConfig,
    SchedulerConfig,
    TrainerConfig,
    read_config,
    write_config,
)
from mettle.trainer.learner import Learner, learning_rate
from mettle.trainer.loading import load_policy
from mettle.trainer.losses.default import DefaultLoss
from mettle.trainer.losses.ipo import IpoLoss
from mettle.trainer.publish import compute_canary, fixed_sequences
from mettle.trainer.tenant import Tenant


def groups(seed=0, number=3):
    rng = np.random.default_rng(seed)
    return [sample for _ in range(number) for sample in make_group(rng)]


def test_metrics_say_what_the_batch_was(mini_model):
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 256, 4)
    samples = [make_sample(rng, prompt, 3, component=c, advantage=1.0) for c in ("rl", "ce", "ref_kl", "rl")]
    metrics = make_learner(mini_model, loss=DefaultLoss(kl_tau=0)).train(make_batch(samples), 1)
    assert metrics["tokens/trained"] == 12
    assert metrics["loss/total"] == pytest.approx(metrics["loss/rl"] + metrics["loss/ce"] + metrics["loss/ref_kl"])
    # A random policy is near uniform over 264 tokens, and a ce weight of .5 halves the component.
    assert metrics["entropy/mean"] == pytest.approx(math.log(264), abs=0.05)
    assert metrics["loss/ce"] == pytest.approx(0.5 * math.log(264), abs=0.1)
    assert metrics["mismatch_kl/mean"] <= metrics["mismatch_kl/max"]
    assert metrics["optim/skipped"] == 0
    assert metrics["masked/share"] == 0


def test_training_raises_what_is_rewarded(mini_model):
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 256, 4)
    good, bad = (make_sample(rng, prompt, 3, advantage=advantage) for advantage in (1.0, -1.0))
    learner = make_learner(mini_model, optim=OptimConfig(lr=1e-2, weight_decay=0.0), loss=DefaultLoss(ratio="none"))
    sequences = [sample["token_ids"].astype(np.int64) for sample in (good, bad)]
    before = compute_canary(learner.policy, sequences, ALONE).logprobs[:, 4:].sum(-1)
    for step in range(1, 6):
        learner.train(make_batch([good, bad]), step)
    after = compute_canary(learner.policy, sequences, ALONE).logprobs[:, 4:].sum(-1)
    assert after[0] > before[0] + 0.5
    assert after[1] < before[1] - 0.5


def test_the_same_steps_give_the_same_bytes(mini_model):
    def weights():
        learner = make_learner(mini_model)
        for step in range(1, 4):
            learner.train(make_batch(groups(step)), step)
        return torch.cat([p.flatten() for p in learner.policy.parameters()])

    assert torch.equal(weights(), weights())


def test_a_batch_without_any_signal_takes_a_step_of_nothing(mini_model):
    samples = groups()
    for sample in samples:
        sample["rl_weights"][:] = 0
    metrics = make_learner(mini_model, optim=OptimConfig(weight_decay=0.0)).train(make_batch(samples), 1)
    assert metrics["loss/total"] == metrics["optim/grad_norm"] == metrics["tokens/trained"] == 0
    assert metrics["optim/skipped"] == 0


def test_the_entropy_bonus_spreads_the_policy_and_fades_with_the_learning_rate(mini_model):
    samples = groups()
    for sample in samples:
        sample["advantages"][:] = 0  # nothing but the bonus trains

    def trained(rate):
        schedule = SchedulerConfig(type="linear", warmup_steps=0, min_lr_ratio=rate)
        optim = OptimConfig(weight_decay=0.0, max_grad_norm=1e9)
        loss = DefaultLoss(kl_tau=0, entropy_tau=0.5)
        return make_learner(mini_model, optim=optim, scheduler=schedule, loss=loss, max_steps=2)

    full, half = trained(1.0).train(make_batch(samples), 2), trained(0.5).train(make_batch(samples), 2)
    assert full["loss/rl"] == pytest.approx(-0.5 * full["entropy/mean"], rel=1e-4)
    assert half["optim/grad_norm"] == pytest.approx(full["optim/grad_norm"] / 2, rel=1e-4)
    learner = trained(1.0)
    assert learner.train(make_batch(samples), 1)["entropy/mean"] < learner.train(make_batch(samples), 2)["entropy/mean"]


def test_three_steps_give_the_numbers_that_they_gave_when_the_loss_was_one_file(mini_model):
    pinned = json.loads((Path(__file__).parent / "pinned.json").read_text())["steps"]
    learner, rng = make_learner(mini_model), np.random.default_rng(5)
    for step, expected in enumerate(pinned, start=1):
        components = ("rl", "ce", "ref_kl") * 2
        made = [make_group(rng, component=c, prompt_length=3 + i) for i, c in enumerate(components)]
        metrics = learner.train(make_batch([sample for group in made for sample in group]), step)
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), (step, name)


def test_bfloat16_trains_in_the_same_direction_and_publishes_exact_canaries(mini_model):
    batch = make_batch(groups())
    exact = make_learner(mini_model)
    rough = Learner(load_policy(mini_model, ALONE, dtype=torch.bfloat16), make_recipe(), ALONE)
    (expected, _), (found, _) = gradients(exact, batch), gradients(rough, batch)
    assert torch.nn.functional.cosine_similarity(expected, found, dim=0) > 0.98
    assert not torch.equal(expected, found)
    sequences = fixed_sequences(264, 3)
    canaries = [compute_canary(learner.policy, sequences, ALONE).logprobs for learner in (exact, rough)]
    np.testing.assert_array_equal(*canaries)


def test_a_step_can_be_read_in_eleven_files(mini_model):
    learner, batch, root = make_learner(mini_model), make_batch(groups()), str(Path(mettle.__file__).parent)
    learner.train(batch, 1)  # what is only imported is not read
    files = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            files.add(frame.f_code.co_filename[len(root) + 1 :])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        learner.train(batch, 2)
    finally:
        sys.setprofile(before)
    assert len(files) <= 11, "\n".join(sorted(files))


def test_vectors_do_not_decay(mini_model):
    policy = load_policy(mini_model, ALONE, dtype=torch.float32)
    matrices, vectors = Tenant.of_base(policy, OptimConfig(weight_decay=0.3)).optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in vectors["params"]} == {1}


def rates(config, steps=20):
    return [learning_rate(step, config, peak=2.0, max_steps=steps) for step in range(1, steps + 1)]


def test_schedules_warm_up_and_decay_to_their_floor():
    assert rates(SchedulerConfig()) == [2.0] * 20
    assert rates(SchedulerConfig(warmup_steps=4))[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    linear = rates(SchedulerConfig(type="linear", warmup_steps=5, min_lr_ratio=0.1))
    assert linear[4] == 2.0
    assert linear[-1] == pytest.approx(0.2)
    assert linear[12] - linear[11] == pytest.approx(linear[18] - linear[17])
    late = rates(SchedulerConfig(type="cosine", decay_steps=4))
    assert late[:16] == [2.0] * 16
    assert late[17] == pytest.approx(1.0)
    assert late[-1] == pytest.approx(0.0)


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 10),
    decay=st.none() | st.integers(1, 40),
    floor=st.floats(0, 1),
)
def test_a_rate_is_never_above_the_peak_and_falls_after_the_warm_up(kind, warmup, decay, floor):
    falling = {} if kind == "constant" else {"decay_steps": decay, "min_lr_ratio": floor}
    config = SchedulerConfig(type=kind, warmup_steps=warmup, **falling)
    found = rates(config)
    assert all(0 <= rate <= 2.0 for rate in found)
    after = found[max(0, warmup - 1) :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))


def test_configs_survive_the_disk_and_name_what_does_not_fit(tmp_path):
    path = tmp_path / "config" / "trainer.json"
    config = TrainerConfig(max_steps=7, loss=IpoLoss(ipo_threshold=0.3), optim=OptimConfig(lr=1e-3))
    write_config(path, config)
    assert read_config(path, TrainerConfig) == config
    path.write_text('{"optim": {"lr": -1}}')
    with pytest.raises(UserError, match=r"trainer.json: optim\.lr: .*greater than 0"):
        read_config(path, TrainerConfig)
    with pytest.raises(UserError, match="is missing"):
        read_config(tmp_path / "none.json", TrainerConfig)
    with pytest.raises(ValidationError, match=r"default\.clip_low\n  Extra inputs"):
        TrainerConfig(loss={"type": "default", "clip_low": 0.3})
    with pytest.raises(ValidationError, match="leaves nothing to decay"):
        TrainerConfig(max_steps=5, scheduler=SchedulerConfig(type="linear", warmup_steps=5))
