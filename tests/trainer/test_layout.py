"""Layouts change what a batch costs and nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.conftest import gradients, make_batch, make_group, make_learner, make_micro, make_sample

from mettle.trainer.config import MicroBatchConfig
from mettle.trainer.layout import Sequences, count_components, empty_layout, plan_layouts

COMPONENTS = ("rl", "ce", "ref_kl")


def close(left, right):
    torch.testing.assert_close(left, right, rtol=2e-4, atol=2e-7)


def mixed_groups(seed, number=5):
    rng = np.random.default_rng(seed)
    return [make_group(rng, component=COMPONENTS[i % 3], prompt_length=3 + i) for i in range(number)]


def flat(groups):
    return [sample for group in groups for sample in group]


@pytest.fixture(scope="module")
def learner(mini_model):
    return make_learner(mini_model)


def plain(learner, **changes):
    """A learner with the same weights and another micro-batch config."""
    from tests.trainer.conftest import ALONE, make_recipe

    from mettle.trainer.learner import Learner

    return Learner(learner.policy, make_recipe(micro_batch=MicroBatchConfig(**changes)), ALONE)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 19), max_rows=st.integers(1, 9), max_tokens=st.integers(8, 200))
def test_permutation_cut_and_sharing_leave_the_gradient_unchanged(learner, seed, cut, max_rows, max_tokens):
    samples = flat(mixed_groups(seed))
    expected, sums = gradients(plain(learner, share_prompts=False, max_rows=1), make_batch([samples]))
    order = np.random.default_rng(seed).permutation(len(samples))
    shuffled = [samples[i] for i in order]
    for share in (True, False):
        other = plain(learner, share_prompts=share, max_rows=max_rows, max_tokens=max_tokens)
        found, found_sums = gradients(other, make_batch([shuffled[:cut], shuffled[cut:]]))
        close(found, expected)
        close(found_sums, sums)


def test_packed_rows_give_the_same_gradient(learner):
    batch = make_batch([flat(mixed_groups(3))])
    expected, _ = gradients(plain(learner, share_prompts=False), batch)
    learner_packed = plain(learner, max_tokens=40)
    sequences = Sequences.of(batch.ranks[0])
    layouts = plan_layouts(sequences, learner_packed.recipe.micro_batch, attention_cost=0.01, is_packed=True)
    assert len(layouts) > 2
    assert all(layout.token_ids.shape[0] == 1 and layout.token_ids.shape[1] <= 40 for layout in layouts)
    learner_packed.plan = lambda _: layouts
    found, _ = gradients(learner_packed, batch)
    close(found, expected)


def test_a_group_is_computed_behind_one_copy_of_its_prompt():
    rng = np.random.default_rng(0)
    group = make_group(rng, 16, prompt_length=30, max_completion=5)
    sequences = Sequences.of([make_micro(group)])
    shared = plan_layouts(sequences, MicroBatchConfig(), attention_cost=1 / 256)
    alone = plan_layouts(sequences, MicroBatchConfig(share_prompts=False), attention_cost=1 / 256)
    assert {layout.form for layout in shared} == {"shared"}
    assert sum(layout.token_ids.size for layout in shared) < sum(layout.token_ids.size for layout in alone) / 3
    assert sum(len(layout.sources) for layout in shared) == sum(len(layout.sources) for layout in alone)


def test_sharing_is_left_alone_where_it_costs_more():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 256, 4)
    group = [make_sample(rng, prompt, 200) for _ in range(8)]
    layouts = plan_layouts(Sequences.of([make_micro(group)]), MicroBatchConfig(), attention_cost=1 / 64)
    assert {layout.form for layout in layouts} == {"padded"}


def test_samples_that_train_nothing_are_not_computed():
    rng = np.random.default_rng(0)
    trained = make_sample(rng, rng.integers(0, 256, 5), 4)
    idle = make_sample(rng, rng.integers(0, 256, 50), 9)
    idle["rl_weights"][:] = 0
    (layout,) = plan_layouts(Sequences.of([make_micro([idle, trained, idle])]), MicroBatchConfig(), attention_cost=0.01)
    assert layout.token_ids.shape == (1, 8)  # 9 tokens, of which the last predicts nothing
    assert layout.targets.labels.tolist() == trained["token_ids"][5:].tolist()


def test_the_first_token_of_a_sequence_never_trains():
    rng = np.random.default_rng(0)
    sample = make_sample(rng, rng.integers(0, 256, 0), 5, component="ce")
    batch = make_batch([[sample, sample]])
    assert count_components(batch).ce == 8
    (layout,) = plan_layouts(Sequences.of(batch.ranks[0]), MicroBatchConfig(), attention_cost=0.01)
    assert len(layout.sources) == 8


def test_padding_and_empty_passes_contribute_exactly_zero(learner):
    samples = flat(mixed_groups(1))
    batch = make_batch([samples])
    expected, sums = gradients(learner, batch)
    layouts = learner.plan(batch)
    twin = plain(learner)
    twin.plan = lambda _: [*layouts, empty_layout(), empty_layout()]
    found, found_sums = gradients(twin, batch)
    assert torch.equal(found, expected)
    assert torch.equal(found_sums, sums)
    only_empty = plain(learner)
    only_empty.plan = lambda _: [empty_layout()]
    nothing, no_sums = gradients(only_empty, batch)
    assert not nothing.any()
    assert not no_sums.any()


def test_garbage_in_the_padding_changes_nothing(learner):
    batch = make_batch([flat(mixed_groups(1))])
    twin = plain(learner)
    expected, _ = gradients(twin, batch)
    layouts = twin.plan(batch)
    for layout in layouts:
        used = np.zeros(layout.token_ids.shape, bool)
        if layout.segments is not None:
            used |= layout.segments >= 0
        else:
            last = np.zeros(len(layout.token_ids), np.int64)
            np.maximum.at(last, layout.sources // used.shape[1], layout.sources % used.shape[1])
            used |= np.arange(used.shape[1])[None] <= last[:, None]
        layout.token_ids[~used] = 99
    assert any((layout.token_ids == 99).any() for layout in layouts)
    twin.plan = lambda _: layouts
    found, _ = gradients(twin, batch)
    assert torch.equal(found, expected)
