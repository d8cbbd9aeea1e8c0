"""Data of the service through the learner: log-probabilities in order and shape, sums that add up, refusals."""

import numpy as np
import pytest
import torch
from tests.trainer.conftest import make_learner

from mettle.trainer.config import MicroBatchConfig
from mettle.trainer.datums import TrainingDatum, sequences_of, split_by_datum
from mettle.trainer.sum_losses import make_sum_loss
from mettle.trainer.tenant import OptimParams


def make_datum(rng, length, num_labels=None):
    shape = (length,) if num_labels is None else (length, num_labels)
    inputs = {name: rng.normal(-3, 0.5, shape) for name in ("weights", "logprobs", "advantages")}
    return TrainingDatum(rng.integers(0, 256, length), rng.integers(0, 256, shape), inputs)


def reference(learner, datum):
    """All logits of one datum, by the network itself."""
    with torch.no_grad():
        logits = learner.policy.network(input_ids=torch.from_numpy(datum.token_ids)[None]).logits[0]
    logprobs = torch.log_softmax(logits.float(), -1)
    targets = torch.from_numpy(datum.targets).reshape(len(datum.token_ids), -1)
    return logprobs.gather(-1, targets).numpy().reshape(datum.targets.shape)


@pytest.mark.parametrize("num_labels", [None, 3])
def test_logprobs_come_back_in_order_and_shape_however_the_data_are_cut(mini_model, num_labels):
    rng = np.random.default_rng(0)
    data = [make_datum(rng, length, num_labels) for length in (5, 1, 9, 2, 9)]
    for rows in (1, 2, 128):
        learner = make_learner(mini_model, micro_batch=MicroBatchConfig(max_rows=rows))
        done = learner.accumulate(sequences_of(data), make_sum_loss("cross_entropy"), is_forward_only=True)
        found = split_by_datum(done.logprobs, data)
        for datum, logprobs in zip(data, found, strict=True):
            np.testing.assert_allclose(logprobs, reference(learner, datum), atol=1e-5)
        expected = -sum((datum.inputs["weights"] * reference(learner, datum)).sum() for datum in data)
        assert done.sums["loss"] == pytest.approx(expected, rel=1e-5)
        assert all(parameter.grad is None for parameter in learner.tenant.trained)


def gradient(learner):
    return torch.cat([p.grad.flatten() for p in learner.tenant.trained])


def test_gradients_of_calls_add_up_until_the_step(mini_model):
    rng = np.random.default_rng(1)
    data = [make_datum(rng, length) for length in (4, 7, 3)]
    loss = make_sum_loss("importance_sampling")
    whole, parts = make_learner(mini_model), make_learner(mini_model)
    whole.accumulate(sequences_of(data), loss)
    for datum in data:
        parts.accumulate(sequences_of([datum]), loss)
    torch.testing.assert_close(gradient(parts), gradient(whole), rtol=1e-4, atol=1e-5)
    params = OptimParams(1e-3, (0.9, 0.95), 1e-12)
    assert parts.step(params)["optim/grad_norm"] == pytest.approx(whole.step(params)["optim/grad_norm"], rel=1e-4)
    assert all(parameter.grad is None for parameter in parts.tenant.trained)
    assert parts.tenant.num_steps == 1


def test_a_step_without_gradients_counts_as_one_with_zeros(mini_model):
    learner = make_learner(mini_model)
    rng = np.random.default_rng(2)
    learner.accumulate(sequences_of([make_datum(rng, 5)]), make_sum_loss("dro"))
    learner.step(OptimParams(1e-3))
    parameter = learner.tenant.trained[0]
    moment = learner.optimizer.state[parameter]["exp_avg"].clone()
    figures = learner.step(OptimParams(1e-3))
    assert figures["optim/grad_norm"] == 0
    torch.testing.assert_close(learner.optimizer.state[parameter]["exp_avg"], moment * 0.9)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: TrainingDatum(np.arange(3), np.arange(2), {}),
            r"target_tokens have shape \[2\], the input has 3 tokens",
        ),
        (lambda: TrainingDatum(np.arange(3), np.arange(3), {"weights": np.ones(2)}), r"weights have shape \[2\]"),
        (lambda: TrainingDatum(np.arange(2), np.arange(2), {"logprobs": np.array([0, -np.inf])}), "not finite"),
        (lambda: TrainingDatum(np.arange(2), np.arange(2), {"q": np.ones(2)}), "there is no input 'q'"),
        (
            lambda: TrainingDatum(np.array([1, 999]), np.arange(2), {}).check(vocab_size=264, inputs=()),
            "go from 1 to 999, the vocabulary has 264",
        ),
        (
            lambda: TrainingDatum(np.arange(2), np.arange(2), {}).check(vocab_size=264, inputs=("weights",)),
            "lack weights; the loss takes weights",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
