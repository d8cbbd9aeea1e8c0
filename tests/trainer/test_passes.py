"""Passes: little is padded, ranks have equally much, and however a batch is planned, its loss and gradient stay."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.conftest import ALONE, gradients, make_batch, make_group, make_learner, make_recipe, make_sample

from mettle.trainer.config import MicroBatchConfig
from mettle.trainer.layout import Sequences, empty_layout, lay_out
from mettle.trainer.learner import Learner
from mettle.trainer.loss import BatchLoss
from mettle.trainer.losses import make_loss
from mettle.trainer.passes import PASS_PRICE, _row_size, _Rows, cut, cut_evenly, plan_cheapest, plan_passes

COST = 1 / 512


def rollouts(seed, *, num_groups, group_size, prompt=(20, 60), completion=(20, 200)):
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(num_groups):
        ids = rng.integers(0, 256, int(rng.integers(*prompt)))
        samples += [make_sample(rng, ids, int(rng.integers(*completion))) for _ in range(group_size)]
    return samples


def shares(sequences, ranks):
    """(tokens that are no padding over all, heaviest rank over the mean, passes that a rank lacks)."""
    own = total = 0
    for each in (each for passes in ranks for each in passes):
        layout = lay_out(sequences, each.form, each.rows)
        total += layout.token_ids.size
        tails = (sequences.needed - sequences.prompts)[np.concatenate(each.rows)].sum()
        heads = sum(
            sequences.prompts[row[0]] if each.form == "shared" else sequences.prompts[row].sum() for row in each.rows
        )
        own += int(tails + heads)
    loads = [sum(each.cost for each in passes) for passes in ranks]
    counts = [len(passes) for passes in ranks]
    return own / total, max(loads) / (sum(loads) / len(loads)), sum(max(counts) - count for count in counts)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_at_least_95_per_cent_are_useful_and_the_ranks_have_equally_much(num_ranks, is_packed):
    for seed in range(3):
        sequences = Sequences.of(make_batch(rollouts(seed, num_groups=32, group_size=16)))
        ranks = plan_passes(
            sequences, MicroBatchConfig(), attention_cost=COST, num_ranks=num_ranks, is_packed=is_packed
        )
        useful, balance, num_dummies = shares(sequences, ranks)
        assert useful >= 0.95
        assert balance <= 1.03
        assert num_dummies == 0


@given(
    seed=st.integers(0, 10_000), num_ranks=st.integers(1, 6), max_rows=st.integers(1, 9),
    max_tokens=st.integers(8, 200), is_packed=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_sequence_that_trains_is_in_one_pass_within_the_limits(seed, num_ranks, max_rows, max_tokens, is_packed):
    rng = np.random.default_rng(seed)
    samples = [s for i in range(4) for s in make_group(rng, int(rng.integers(1, 6)), prompt_length=3 + 5 * i)]
    for sample in samples[::5]:
        sample["rl_weights"][:] = 0
    sequences = Sequences.of(make_batch(samples))
    config = MicroBatchConfig(max_rows=max_rows, max_tokens=max_tokens)
    ranks = plan_passes(sequences, config, attention_cost=COST, num_ranks=num_ranks, is_packed=is_packed)
    passes = [each for own in ranks for each in own]
    chosen = [s for each in passes for row in each.rows for s in row.tolist()]
    assert sorted(chosen) == np.flatnonzero(sequences.num_members).tolist()
    for each in passes:
        layout = lay_out(sequences, each.form, each.rows)
        assert len(each.rows) <= max_rows
        assert layout.token_ids.size <= max_tokens or len(np.concatenate(each.rows)) == 1
    missing = sum(max(map(len, ranks)) - len(own) for own in ranks)
    assert missing == 0 or all(len(each.rows) == 1 or each.form == "packed" for each in passes)  # no more to split


def test_a_batch_of_a_few_groups_is_split_over_the_ranks_behind_copies_of_their_prompts():
    sequences = Sequences.of(make_batch(rollouts(0, num_groups=2, group_size=16, prompt=(50, 51))))
    ranks = plan_passes(sequences, MicroBatchConfig(), attention_cost=COST, num_ranks=8)
    _, balance, num_dummies = shares(sequences, ranks)
    assert num_dummies == 0
    assert balance < 1.25


def test_more_ranks_than_sequences_leaves_ranks_without_a_pass():
    sequences = Sequences.of(make_batch(rollouts(0, num_groups=1, group_size=2)))
    ranks = plan_passes(sequences, MicroBatchConfig(), attention_cost=COST, num_ranks=4)
    assert sorted(map(len, ranks)) == [0, 0, 1, 1]
    idle = make_sample(np.random.default_rng(0), np.array([1, 2]), 3, component="none")
    assert plan_passes(Sequences.of(make_batch([idle])), MicroBatchConfig(), attention_cost=COST, num_ranks=2) == [
        [],
        [],
    ]


def rows_of(widths, **limits):
    widths = np.array(widths)
    return _Rows.of("padded", [np.array([i]) for i in range(len(widths))], widths, 0.0, MicroBatchConfig(**limits))


@given(widths=st.lists(st.integers(1, 300), min_size=1, max_size=9), max_rows=st.integers(1, 9))
def test_a_cut_is_the_cheapest_of_all_cuts(widths, max_rows):
    kind = rows_of(widths, max_rows=max_rows, max_tokens=600)

    def cheapest(first):
        if first == len(widths):
            return 0.0
        ends = range(first + 1, first + kind.most_from(first) + 1)
        return min(kind.cost(first, end) + cheapest(end) for end in ends)

    assert sum(kind.cost(*bounds) for bounds in cut(kind)) == pytest.approx(cheapest(0))


@given(widths=st.lists(st.integers(1, 300), min_size=1, max_size=12), number=st.integers(1, 12))
def test_an_even_cut_keeps_to_its_number_and_no_pass_could_be_cheaper(widths, number):
    kind = rows_of(widths, max_tokens=10**6)
    (bounds,) = cut_evenly([kind], number)
    assert len(bounds) <= number
    assert [end for _, end in bounds[:-1]] == [first for first, _ in bounds[1:]]
    best = {(0, 0): 0.0}  # (passes, rows) to the costliest pass
    for used in range(1, number + 1):
        for end in range(1, len(widths) + 1):
            best[used, end] = min(
                (
                    max(best[used - 1, first], kind.cost(first, end))
                    for first in range(end)
                    if (used - 1, first) in best
                ),
                default=np.inf,
            )
    least = min(best[used, len(widths)] for used in range(1, number + 1))
    assert max(kind.cost(*each) for each in bounds) <= least + 1e-3 * (least + PASS_PRICE)


# However it is planned, it is the same step


def exact(learner, batch, ranks=1, **micro):
    """(loss, gradient) with the batch on so many ranks, one after the other."""
    other = Learner(learner.policy, make_recipe(micro_batch=MicroBatchConfig(**micro), loss=LOSS), ALONE)
    sequences = Sequences.of(batch)
    plan = plan_passes(sequences, other.recipe.micro_batch, attention_cost=COST, num_ranks=ranks)
    most = max(map(len, plan))
    learner.policy.zero_grad()
    loss = 0.0
    for own in plan:
        layouts = [lay_out(sequences, each.form, each.rows) for each in own]
        other.plan = lambda _, found=layouts: found + [empty_layout()] * (most - len(found))
        done = other.accumulate(sequences, BatchLoss(LOSS, sequences.counts))
        counts = sequences.counts
        loss += sum(done.sums[name] / max(1, getattr(counts, name)) for name in ("rl", "ce", "ref_kl"))
    return loss, torch.cat([p.grad.flatten() for p in learner.policy.parameters()]).clone()


LOSS = make_loss("masked_is", {"geometric_low": 0.5})  # compares tokens with others of their sequence


@pytest.fixture(scope="module")
def learner(mini_model):
    return make_learner(mini_model)


def same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert torch.linalg.vector_norm(found[1] - expected[1]) <= 1e-6 * torch.linalg.vector_norm(expected[1])


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(5)
    kinds = ("rl", "ce", "ref_kl")
    return [s for i in range(6) for s in make_group(rng, 4, prompt_length=3 + 2 * i, component=kinds[i % 3])]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [{}, {"max_rows": 3}, {"max_tokens": 30}, {"share_prompts": False}], ids=str)
def test_repacked_and_spread_over_ranks_it_is_the_same_loss_and_gradient(learner, samples, micro, ranks):
    batch = make_batch(samples)
    same(exact(learner, batch, ranks, **micro), exact(learner, batch, share_prompts=False, max_rows=1))


@pytest.mark.parametrize("seed", range(3))
def test_permuted_samples_give_the_same_loss_and_gradient(learner, samples, seed):
    order = np.random.default_rng(seed).permutation(len(samples))
    same(exact(learner, make_batch([samples[i] for i in order])), exact(learner, make_batch(samples)))


def test_split_into_two_calls_it_is_the_same_gradient(learner, samples):
    whole = Sequences.of(make_batch(samples)).counts
    _, expected = exact(learner, make_batch(samples))
    learner.policy.zero_grad()
    for half in (samples[::2], samples[1::2]):
        learner.accumulate(Sequences.of(make_batch(half)), BatchLoss(LOSS, whole))
    found = torch.cat([p.grad.flatten() for p in learner.policy.parameters()])
    assert torch.linalg.vector_norm(found - expected) <= 1e-6 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("ranks", [1, 3])
def test_in_the_same_order_it_is_the_same_to_the_bit(learner, samples, ranks):
    first, again = (exact(learner, make_batch(samples), ranks) for _ in range(2))
    assert first[0] == again[0]
    assert torch.equal(first[1], again[1])


def test_a_rank_without_a_pass_contributes_nothing(learner, samples):
    batch = make_batch(samples[:2])
    same(exact(learner, batch, 4), exact(learner, batch))


# Rows behind a prompt


def cost_per_sequence(prompt, tail, attention_cost, size):
    """Of a row of `size` sequences behind one prompt; alone, attention looks at half the square."""
    length = prompt + size * tail
    return length + attention_cost * length**2 / 2 if size == 1 else (length + attention_cost * length**2) / size


@pytest.mark.parametrize("attention_cost", [1 / 64, 1 / 256, 1 / 1024])
@pytest.mark.parametrize("prompt", [1, 6, 40, 300])
@pytest.mark.parametrize("tail", [1, 8, 60])
@pytest.mark.parametrize("number", [2, 5, 64])
def test_a_row_has_about_as_many_sequences_as_cost_least(attention_cost, prompt, tail, number):
    sequences = SimpleNamespace(prompts=np.full(number, prompt), needed=np.full(number, prompt + tail))
    size = _row_size(sequences, np.arange(number), attention_cost, 10**6)
    costs = {m: cost_per_sequence(prompt, tail, attention_cost, m) for m in range(1, number + 1)}
    assert 1 <= size <= number
    assert costs[size] <= 1.02 * min(costs.values())
    assert (size > 1) == (min(costs.values()) < costs[1]) or costs[1] <= 1.02 * min(costs.values())


def test_a_row_keeps_to_the_tokens_of_a_pass():
    sequences = SimpleNamespace(prompts=np.full(64, 300), needed=np.full(64, 310))
    group = np.arange(64)
    assert _row_size(sequences, group, 1 / 4096, 10**6) == 64
    assert _row_size(sequences, group, 1 / 4096, 360) == 6
    assert _row_size(sequences, group, 1 / 4096, 359) == 5
    assert _row_size(sequences, group, 1 / 4096, 301) == 1
    assert _row_size(sequences, group, 1 / 4096, 100) == 1


def behind_instructions(seed, *, length=120, num=12):
    """Questions of their own behind the same instructions; one begins to answer at once, one trains nothing."""
    rng = np.random.default_rng(seed)
    instructions = rng.integers(0, 256, length)
    asked = [np.concatenate([instructions, rng.integers(0, 256, int(n))]) for n in rng.integers(1, 9, num)]
    samples = [make_sample(rng, prompt, int(rng.integers(1, 12))) for prompt in [*asked, instructions]]
    idle = make_sample(rng, rng.integers(0, 256, 5), 4)
    idle["rl_weights"][:] = 0
    return [*samples, idle]


def test_instructions_before_questions_of_their_own_are_computed_once_with_the_same_loss_and_gradient(mini_model):
    batch = make_batch(behind_instructions(0))
    sequences = Sequences.of(batch)
    whole = plan_passes(sequences, MicroBatchConfig(), attention_cost=COST)
    shared, ranks = plan_cheapest(sequences, MicroBatchConfig(), attention_cost=COST)
    assert sum(each.cost for each in ranks[0]) < 0.6 * sum(each.cost for each in whole[0])
    assert shared.prompts[sequences.num_members > 0].tolist() == [120] * 13
    learner = make_learner(mini_model)
    gradient, sums = gradients(learner, batch)
    apart = MicroBatchConfig(share_prompts=False)
    learner.recipe = replace(learner.recipe, micro_batch=apart)
    assert plan_cheapest(sequences, apart, attention_cost=COST)[0] is sequences
    expected, expected_sums = gradients(learner, batch)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sums, expected_sums)


def test_groups_with_nothing_long_in_common_are_planned_as_ever():
    sequences = Sequences.of(make_batch(rollouts(0, num_groups=6, group_size=8)))
    found, ranks = plan_cheapest(sequences, MicroBatchConfig(), attention_cost=COST)
    assert found is sequences
    assert [[each.cost for each in own] for own in ranks] == [
        [each.cost for each in own] for own in plan_passes(sequences, MicroBatchConfig(), attention_cost=COST)
    ]
