"""Whole distributions against a teacher's: NumPy twins, bounds, the two ways in which a teacher's numbers arrive."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.conftest import ALONE, MINI, make_batch, make_recipe, make_sample

from mettle.errors import UserError
from mettle.trainer import model as model_module
from mettle.trainer.config import DistillationConfig, OptimConfig, TrainerConfig
from mettle.trainer.distillation import Distiller, divergence, listed
from mettle.trainer.layout import Sequences
from mettle.trainer.learner import Learner
from mettle.trainer.loading import load_policy
from mettle.trainer.loop import load_teacher
from mettle.trainer.loss import BatchLoss
from mettle.trainer.losses.default import DefaultLoss
from mettle.trainer.policy import write_policy

FORMS = [
    DistillationConfig(divergence="forward_kl"),
    DistillationConfig(divergence="reverse_kl"),
    DistillationConfig(divergence="jsd"),
    DistillationConfig(divergence="jsd", jsd_weight=0.9),
]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.divergence}-{form.jsd_weight:g}")


def twin(policy, teacher, form):
    """Of two distributions [V], from the definition of the Kullback-Leibler divergence."""

    def kl(a, b):
        return sum(x * np.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    b = form.jsd_weight
    mixed = b * teacher + (1 - b) * policy
    return {
        "forward_kl": lambda: kl(teacher, policy),
        "reverse_kl": lambda: kl(policy, teacher),
        "jsd": lambda: b * kl(teacher, mixed) + (1 - b) * kl(policy, mixed),
    }[form.divergence]()


def two(seed, number=4, size=9):
    """Logits of the policy and log-probabilities of a teacher."""
    rng = np.random.default_rng(seed)
    logits, teacher = (torch.from_numpy(rng.normal(0, 2, (number, size))) for _ in range(2))
    return logits, torch.log_softmax(teacher, -1)


@each_form
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_divergence_equals_its_numpy_twin_and_is_zero_between_equals(form, seed):
    logits, teacher = two(seed)
    policy = torch.log_softmax(logits, -1)
    found = divergence(policy, teacher, form)
    expected = [twin(p, t, form) for p, t in zip(policy.exp().numpy(), teacher.exp().numpy(), strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(divergence(teacher, teacher, form), 0, atol=1e-12)


@each_form
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_list_is_a_lower_bound_that_grows_with_its_length_and_is_exact_at_last(form, seed):
    logits, teacher = two(seed)
    whole = divergence(torch.log_softmax(logits, -1), teacher, form)
    before = torch.zeros_like(whole)
    for k in range(1, 10):
        values, ids = teacher.topk(k)
        found = divergence(*listed(logits, ids, values), form)
        assert (found >= before - 1e-9).all()
        assert (found <= whole + 1e-9).all()
        before = found
    torch.testing.assert_close(before, whole)


@each_form
def test_a_shorter_list_in_a_wider_table_says_the_same(form):
    logits, teacher = two(5)
    values, ids = teacher.topk(3)
    wider = torch.nn.functional.pad(ids, (0, 4)), torch.nn.functional.pad(values, (0, 4), value=-torch.inf)
    found = divergence(*listed(logits, *wider), form)
    torch.testing.assert_close(found, divergence(*listed(logits, ids, values), form))


@each_form
def test_gradients_are_right_and_finite_where_the_list_says_it_is_all(form):
    logits, teacher = two(3)
    values, ids = teacher.topk(4)
    assert torch.autograd.gradcheck(lambda x: divergence(*listed(x, ids, values), form), (logits.requires_grad_(),))
    sure = torch.log(torch.tensor([[1.0, 0.0, 0.0]])).clamp(min=-40)
    own = torch.tensor([[60.0, 0, 0, 0, 0]], requires_grad=True)
    divergence(*listed(own, torch.tensor([[0, 1, 2]]), sure), form).sum().backward()
    assert torch.isfinite(own.grad).all()


# In a learner


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    changes = {"seed": 7, "init_std": 0.3}
    return write_policy(tmp_path_factory.mktemp("teacher") / "model", MINI.model_copy(update=changes))


def distilled_batch(number=3, **columns):
    """Sequences whose sampled tokens are to be fitted to a teacher."""
    rng = np.random.default_rng(0)
    batch = make_batch([make_sample(rng, np.arange(5 + i), 4 + i) for i in range(number)])
    weights = np.where(batch.loss_mask, 0.5, 0).astype(np.float32)
    return replace(batch, rl_weights=np.zeros_like(weights), distill_weights=weights, **columns)


def learner_with(model, teacher, form=FORMS[1]):
    policy = load_policy(model, ALONE, dtype=torch.float32)
    config = TrainerConfig(distillation=form.model_copy(update={"teacher": teacher}))
    recipe = make_recipe(optim=OptimConfig(lr=1e-2))
    return Learner(policy, recipe, ALONE, distiller=Distiller(config.distillation, load_teacher(config, policy, ALONE)))


def told_by(teacher, batch, k):
    """What a teacher lists at each token of a batch."""
    network = load_policy(teacher, ALONE, dtype=torch.float32).network
    ids, logprobs = np.zeros((len(batch.token_ids), k), np.int32), np.full((len(batch.token_ids), k), -np.inf, "f4")
    start = 0
    for length in batch.sequence_lengths:
        tokens = torch.from_numpy(batch.token_ids[start : start + length].astype(np.int64))[None]
        with torch.no_grad():
            values, found = torch.log_softmax(network(input_ids=tokens).logits[0], -1).topk(k)
        ids[start + 1 : start + length], logprobs[start + 1 : start + length] = found[:-1], values[:-1]
        start += length
    return {"teacher_ids": ids, "teacher_logprobs": logprobs}


def gradient_of(learner, batch):
    sequences = Sequences.of(batch)
    done = learner.accumulate(sequences, BatchLoss(DefaultLoss(), sequences.counts))
    found = torch.cat([parameter.grad.flatten() for parameter in learner.tenant.trained])
    learner.tenant.forget_gradients()
    return done.sums["distill"] / sequences.counts.distill, found


@each_form
def test_a_teacher_in_the_trainer_and_one_that_lists_every_token_give_one_gradient(
    mini_model, teacher_folder, form, monkeypatch
):
    learner = learner_with(mini_model, teacher_folder, form)
    batch = distilled_batch()
    whole, gradient = gradient_of(learner, batch)
    everything = told_by(teacher_folder, batch, learner.policy.vocab_size)
    by_list, same = gradient_of(learner, replace(batch, **everything))
    assert whole == pytest.approx(by_list, abs=1e-6)
    assert whole > 0.01
    torch.testing.assert_close(gradient, same, atol=1e-6, rtol=1e-4)
    monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", 3 * learner.policy.vocab_size)  # the head in chunks of three
    again, chunked = gradient_of(learner, batch)
    assert again == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(chunked, gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("k", [None, 4])
def test_steps_bring_the_policy_to_its_teacher(mini_model, teacher_folder, k):
    learner = learner_with(mini_model, teacher_folder if k is None else None)
    batch = distilled_batch(**({} if k is None else told_by(teacher_folder, distilled_batch(), k)))
    figures = [learner.train(batch, step) for step in range(1, 13)]
    assert figures[-1]["loss/distill"] < 0.5 * figures[0]["loss/distill"]
    assert figures[0]["loss/total"] == figures[0]["loss/distill"]
    assert figures[0]["tokens/trained"] == batch.loss_mask.sum()


def test_a_token_without_a_list_where_others_have_one_neither_trains_nor_counts(mini_model, teacher_folder):
    told = told_by(teacher_folder, distilled_batch(), 4)
    told["teacher_logprobs"][np.flatnonzero(distilled_batch().loss_mask)[0]] = -np.inf
    counts = Sequences.of(distilled_batch(**told)).counts
    assert (counts.distill, counts.non_finite) == (distilled_batch().loss_mask.sum() - 1, 1)


def test_without_any_teacher_the_batch_is_refused_and_so_is_one_of_other_words(mini_model, tmp_path):
    with pytest.raises(UserError, match=r"name its folder in trainer\.distillation\.teacher"):
        learner_with(mini_model, None).train(distilled_batch(), 1)
    policy = load_policy(mini_model, ALONE, dtype=torch.float32)
    policy.vocab_size += 1
    config = TrainerConfig(distillation=DistillationConfig(teacher=mini_model))
    with pytest.raises(UserError, match="take a teacher with the policy's tokenizer"):
        load_teacher(config, policy, ALONE)
