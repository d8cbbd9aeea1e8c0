"""Layouts change what a batch costs and nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.conftest import (
    ALONE,
    branching,
    gradients,
    layouts_of,
    make_batch,
    make_group,
    make_learner,
    make_recipe,
    make_sample,
    planned,
)

from mettle.trainer.config import MicroBatchConfig
from mettle.trainer.layout import Sequences, empty_layout
from mettle.trainer.learner import Learner
from mettle.trainer.losses import make_loss
from mettle.trainer.model import row_mask

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
    return Learner(learner.policy, make_recipe(micro_batch=MicroBatchConfig(**changes)), ALONE)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), max_rows=st.integers(1, 9), max_tokens=st.integers(8, 200))
def test_permutation_cut_and_sharing_leave_the_gradient_unchanged(learner, seed, max_rows, max_tokens):
    samples = flat(mixed_groups(seed))
    expected, sums = gradients(plain(learner, share_prompts=False, max_rows=1), make_batch(samples))
    order = np.random.default_rng(seed).permutation(len(samples))
    shuffled = [samples[i] for i in order]
    for share in (True, False):
        other = plain(learner, share_prompts=share, max_rows=max_rows, max_tokens=max_tokens)
        found, found_sums = gradients(other, make_batch(shuffled))
        close(found, expected)
        close(found_sums, sums)


def test_packed_rows_give_the_same_gradient(learner):
    batch = make_batch(flat(mixed_groups(3)))
    expected, _ = gradients(plain(learner, share_prompts=False), batch)
    learner_packed = plain(learner, max_tokens=40)
    layouts = planned(batch, learner_packed.recipe.micro_batch, attention_cost=0.01, is_packed=True)
    assert len(layouts) > 2
    assert all(layout.token_ids.shape[0] == 1 and layout.token_ids.shape[1] <= 40 for layout in layouts)
    learner_packed.plan = lambda _: layouts
    found, _ = gradients(learner_packed, batch)
    close(found, expected)


def test_a_group_is_computed_behind_one_copy_of_its_prompt():
    rng = np.random.default_rng(0)
    group = make_group(rng, 16, prompt_length=30, max_completion=5)
    shared = planned(make_batch(group), MicroBatchConfig(), attention_cost=1 / 256)
    alone = planned(make_batch(group), MicroBatchConfig(share_prompts=False), attention_cost=1 / 256)
    assert {layout.form for layout in shared} == {"shared"}
    assert sum(layout.token_ids.size for layout in shared) < sum(layout.token_ids.size for layout in alone) / 3
    assert sum(len(layout.sources) for layout in shared) == sum(len(layout.sources) for layout in alone)


def test_sharing_is_left_alone_where_it_costs_more():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 256, 4)
    group = [make_sample(rng, prompt, 200) for _ in range(8)]
    layouts = planned(make_batch(group), MicroBatchConfig(), attention_cost=1 / 64)
    assert {layout.form for layout in layouts} == {"padded"}


def test_samples_that_train_nothing_are_not_computed():
    rng = np.random.default_rng(0)
    trained = make_sample(rng, rng.integers(0, 256, 5), 4)
    idle = make_sample(rng, rng.integers(0, 256, 50), 9)
    idle["rl_weights"][:] = 0
    (layout,) = planned(make_batch([idle, trained, idle]), MicroBatchConfig(), attention_cost=0.01)
    assert layout.token_ids.shape == (1, 8)  # 9 tokens, of which the last predicts nothing
    assert layout.targets.token_ids.tolist() == trained["token_ids"][5:].tolist()


def test_the_first_token_of_a_sequence_never_trains():
    rng = np.random.default_rng(0)
    sample = make_sample(rng, rng.integers(0, 256, 0), 5, component="ce")
    batch = make_batch([sample, sample])
    assert Sequences.of(batch).counts.ce == 8
    (layout,) = planned(batch, MicroBatchConfig(), attention_cost=0.01)
    assert len(layout.sources) == 8


def test_padding_and_empty_passes_contribute_exactly_zero(learner):
    samples = flat(mixed_groups(1))
    batch = make_batch(samples)
    expected, sums = gradients(learner, batch)
    layouts = learner.plan(Sequences.of(batch))
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
    batch = make_batch(flat(mixed_groups(1)))
    twin = plain(learner)
    expected, _ = gradients(twin, batch)
    layouts = twin.plan(Sequences.of(batch))
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


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), max_rows=st.integers(1, 9), max_tokens=st.integers(8, 200))
def test_a_sequence_is_never_split_over_passes_and_its_tokens_have_one_number(learner, seed, max_rows, max_tokens):
    samples = flat(mixed_groups(seed))
    for mark, sample in enumerate(samples):
        sample["versions"][:] = mark
    batch = make_batch(samples)
    for layouts in (
        planned(batch, MicroBatchConfig(max_rows=max_rows, max_tokens=max_tokens), attention_cost=0.01),
        planned(batch, MicroBatchConfig(max_tokens=max_tokens), attention_cost=0.01, is_packed=True),
    ):
        marks = []
        for targets in (layout.targets for layout in layouts):
            pairs = set(zip(targets.sequences.tolist(), targets.versions.tolist(), strict=True))
            assert len(pairs) == len({number for number, _ in pairs}) == len({mark for _, mark in pairs})
            assert targets.sequences.max() < len(targets.sequences)
            marks += [mark for _, mark in pairs]
        assert sorted(marks) == list(range(len(samples)))


@pytest.mark.parametrize("bad", [-np.inf, np.nan, np.inf])
@pytest.mark.parametrize("component", ["rl", "ref_kl"])
def test_a_token_that_cannot_be_compared_neither_trains_nor_counts(learner, component, bad):
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 256, 5)
    samples = [make_sample(rng, prompt, 6, component=component, advantage=1.0) for _ in range(3)]
    expected, expected_sums = gradients(learner, make_batch([{**s, **_without_last(s)} for s in samples]))
    for sample in samples:
        sample["logprobs"][-1] = bad
    batch = make_batch(samples)
    counts = Sequences.of(batch).counts
    assert (getattr(counts, component), counts.non_finite) == (15, 3)
    found, sums = gradients(learner, batch)
    close(found, expected)
    close(sums, expected_sums)
    assert torch.isfinite(found).all()


def _without_last(sample):
    """The weights of a sample whose last token trains nothing."""
    names = ("rl_weights", "ref_kl_weights")
    return {name: np.where(np.arange(len(sample[name])) < len(sample[name]) - 1, sample[name], 0) for name in names}


def test_each_component_counts_the_tokens_that_have_a_weight_in_it_and_something_before_them():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 256, 5)
    samples = [make_sample(rng, prompt, length, component=kind) for kind, length in (("rl", 6), ("ce", 3))]
    samples.append(make_sample(rng, prompt, 4, component="ce"))
    samples[1]["ce_weights"] *= 2  # 1, as most have it
    samples[-1]["ce_weights"][[0, -1]] = 0.5, 0.0  # nothing predicts the first, and the last has no weight
    counts = Sequences.of(make_batch(samples)).counts
    assert (counts.rl, counts.ce, counts.ref_kl, counts.distill, counts.non_finite) == (6, 3 + 3, 0, 0, 0)


def test_what_all_prompts_begin_with_is_told_from_what_only_some_do():
    def shared(*prompts):
        rng = np.random.default_rng(0)
        samples = [make_sample(rng, np.array(prompt), 3) for prompt in prompts]
        return Sequences.of(make_batch(samples)).behind_common_prefix().prompts.tolist()

    assert shared([1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 3]) == [2, 2, 2]
    assert shared([1, 2, 3], [1, 2, 3]) == [3, 3]
    assert shared([1, 2, 3], [7, 2, 3]) == [0, 0]
    assert shared([5, 6]) == [2], "one by itself has all of its prompt"


def test_a_pull_towards_a_reference_wants_a_token_that_was_sampled_and_a_reference_that_is_known():
    rng = np.random.default_rng(0)
    sample = make_sample(rng, rng.integers(0, 256, 5), 6, component="ref_kl")
    sample["ref_kl_weights"][3] = 1  # a token of the prompt
    sample["ref_logprobs"][-1] = -np.inf
    counts = Sequences.of(make_batch([sample])).counts
    assert (counts.ref_kl, counts.non_finite) == (5, 2)


def sequences_of(*needed, prompt=2):
    """One sequence for each number of tokens that have to be computed, with prompts that differ."""
    rng = np.random.default_rng(0)
    return Sequences.of(
        make_batch([make_sample(rng, np.array([i] * prompt), length + 1 - prompt) for i, length in enumerate(needed)])
    )


def shapes(needed, *, is_packed=False, **limits):
    sequences = sequences_of(*needed)
    config = MicroBatchConfig(share_prompts=False, **limits)
    layouts = layouts_of(sequences, config, attention_cost=0.01, is_packed=is_packed)
    return [layout.token_ids.shape for layout in layouts]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, [(4, 5)]),
        ({"max_rows": 4}, [(4, 5)]),
        ({"max_rows": 3}, [(3, 5), (1, 3)]),
        ({"max_rows": 2}, [(2, 5), (2, 5)]),
        ({"max_tokens": 20}, [(4, 5)]),
        ({"max_tokens": 19}, [(3, 5), (1, 3)]),
        ({"max_tokens": 15}, [(3, 5), (1, 3)]),
        ({"max_tokens": 14}, [(2, 5), (2, 5)]),
        ({"max_tokens": 4}, [(1, 5), (1, 5), (1, 5), (1, 3)]),
    ],
)
def test_a_pass_takes_as_many_rows_as_its_limits_allow_longest_first(limits, expected):
    assert shapes([5, 3, 5, 5], **limits) == expected


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(13, [(1, 13)]), (12, [(1, 8), (1, 5)]), (8, [(1, 8), (1, 5)]), (4, [(1, 5), (1, 5), (1, 3)])]
)  # fmt: skip
def test_a_packed_pass_takes_as_many_tokens_as_its_limit_allows(max_tokens, expected):
    assert shapes([5, 3, 5], is_packed=True, max_tokens=max_tokens) == expected


def test_nothing_chosen_is_no_pass_and_an_empty_pass_has_one_token_and_no_target():
    idle = make_sample(np.random.default_rng(0), np.array([1, 2]), 3, component="none")
    assert planned(make_batch([idle]), MicroBatchConfig(), attention_cost=0.01) == []
    empty = empty_layout()
    assert (empty.form, empty.token_ids.tolist(), empty.positions.tolist()) == ("padded", [[0]], [[0]])
    assert (empty.segments, len(empty.sources), len(empty.targets.token_ids)) == (None, 0, 0)


def test_padded_and_packed_passes_predict_each_token_from_the_one_before():
    rng = np.random.default_rng(0)
    long, short = make_sample(rng, np.array([1, 2]), 3), make_sample(rng, np.array([3, 4, 5]), 1)
    batch = make_batch([short, long])
    (padded,) = planned(batch, MicroBatchConfig(share_prompts=False), attention_cost=0.01)
    first, second = long["token_ids"], short["token_ids"]
    assert padded.token_ids.tolist() == [first[:4].tolist(), [*second[:3].tolist(), 0]]
    assert padded.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert padded.sources.tolist() == [1, 2, 3, 4 + 2]
    assert padded.targets.token_ids.tolist() == [*first[2:].tolist(), second[3]]
    assert padded.targets.sequences.tolist() == [0, 0, 0, 1]
    (packed,) = planned(batch, MicroBatchConfig(), attention_cost=0.01, is_packed=True)
    assert packed.token_ids.tolist() == [[*first[:4].tolist(), *second[:3].tolist()]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert packed.sources.tolist() == [1, 2, 3, 6]
    assert packed.targets.sequences.tolist() == [0, 0, 0, 1]


def test_a_shared_row_is_laid_out_as_its_picture_says():
    rng = np.random.default_rng(0)
    prompt = np.array([9, 8, 7, 6])
    a, b = make_sample(rng, prompt, 3), make_sample(rng, prompt, 4)
    (layout,) = planned(make_batch([a, b]), MicroBatchConfig(), attention_cost=1 / 256)
    own_a, own_b = a["token_ids"][4:6].tolist(), b["token_ids"][4:7].tolist()
    assert layout.form == "shared"
    assert layout.token_ids.tolist() == [[9, 8, 7, 6, *own_a, *own_b]]
    assert layout.segments.tolist() == [[0, 0, 0, 0, 1, 1, 2, 2, 2]]
    assert layout.positions.tolist() == [[0, 1, 2, 3, 4, 5, 4, 5, 6]]
    assert layout.sources.tolist() == [3, 4, 5, 3, 6, 7, 8]
    assert layout.targets.sequences.tolist() == [0, 0, 0, 1, 1, 1, 1]
    other = make_sample(rng, np.array([1, 1, 1]), 1)
    rows = planned(make_batch([a, b, other, other, other]), MicroBatchConfig(), attention_cost=1 / 256)
    (both,) = [layout for layout in rows if layout.token_ids.shape[0] == 2]
    assert both.segments.tolist()[1] == [0, 0, 0, -1, -1, -1, -1, -1, -1]


def said(prompt, *answers):
    """A group of rollouts of one prompt that said these."""
    rng = np.random.default_rng(0)
    group = [make_sample(rng, np.array(prompt), len(answer)) for answer in answers]
    for sample, answer in zip(group, answers, strict=True):
        sample["token_ids"][len(prompt) :] = answer
    return group


def test_what_answers_begin_with_alike_is_computed_once():
    group = said([9, 8, 7, 6], [1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6], [2, 2, 3], [1, 2])
    (layout,) = planned(make_batch(group), MicroBatchConfig(), attention_cost=1 / 256)
    # The last token of an answer predicts nothing, so these stand there, in the order of a dictionary: 1, 123, 125, 125
    # and 22.
    assert layout.token_ids.tolist() == [[9, 8, 7, 6, 1, 2, 3, 5, 2, 2]]
    assert layout.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 6, 4, 5]]
    assert layout.segments.tolist() == [[0, 0, 0, 0, 1, 2, 2, 3, 5, 5]]
    assert layout.sources.tolist() == [3, 4, 3, 4, 5, 6, 3, 4, 5, 7, 3, 4, 5, 7, 3, 8, 9]
    assert layout.targets.sequences.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4]
    looks = row_mask(layout, torch.device("cpu"))[0, 0].int().tolist()
    assert looks[6] == [1, 1, 1, 1, 1, 1, 1, 0, 0, 0]  # the 3 sees 1 and 2
    assert looks[7] == [1, 1, 1, 1, 1, 1, 0, 1, 0, 0]  # and so does the 5, but not the 3
    assert looks[9] == [1, 1, 1, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["default", "gspo"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), max_rows=st.integers(1, 9), max_tokens=st.integers(12, 200))
def test_computing_what_is_alike_once_leaves_the_gradient_unchanged(learner, kind, seed, max_rows, max_tokens):
    loss = make_loss(kind, {})
    samples = flat(branching(group) for group in mixed_groups(seed))
    for sample in samples[::3]:
        sample["temperatures"][:] = 0.7  # two ask the same of one state at different temperatures
    batch = make_batch(samples)
    recipes = [
        make_recipe(loss=loss, micro_batch=MicroBatchConfig(**changes))
        for changes in ({"share_prompts": False, "max_rows": 1}, {"max_rows": max_rows, "max_tokens": max_tokens})
    ]
    apart, together = (Learner(learner.policy, recipe, ALONE) for recipe in recipes)
    (expected, sums), (found, found_sums) = gradients(apart, batch), gradients(together, batch)
    close(found, expected)
    close(found_sums, sums)


def test_a_group_that_says_few_different_things_costs_what_is_different():
    rng = np.random.default_rng(0)
    groups = [branching(make_group(rng, 16, prompt_length=12, max_completion=6)) for _ in range(8)]
    layouts = planned(make_batch(flat(groups)), MicroBatchConfig(), attention_cost=1 / 256)
    computed = sum(int((layout.segments >= 0).sum()) for layout in layouts)
    answers = [[tuple(s["token_ids"][12:-1].tolist()) for s in group] for group in groups]
    different = sum(len({said[:i] for said in group for i in range(1, len(said) + 1)}) for group in answers)
    assert computed == 8 * 12 + different < 8 * 12 + sum(len(said) for group in answers for said in group) / 2


def test_rows_of_what_begins_alike_keep_to_the_tokens_of_a_pass():
    rng = np.random.default_rng(0)
    group = branching(make_group(rng, 64, prompt_length=10, max_completion=12))
    for limit in (24, 40, 80, 1000):
        layouts = planned(make_batch(group), MicroBatchConfig(max_tokens=limit), attention_cost=1 / 256)
        assert max(layout.token_ids.size for layout in layouts) <= limit
        assert sum(len(layout.sources) for layout in layouts) == sum(int(s["loss_mask"].sum()) for s in group)


def test_what_took_experts_of_its_own_is_computed_by_itself():
    group = said([9, 8, 7, 6], [1, 2, 3], [1, 2, 3])
    for sample in group:
        sample["experts"] = np.zeros((7, 2), np.int16)
    (layout,) = planned(make_batch(group), MicroBatchConfig(), attention_cost=1 / 256)
    assert layout.reach is None
    assert layout.token_ids.tolist() == [[9, 8, 7, 6, 1, 2, 1, 2]]
