"""Turns to samples: extended where they continue, branched where rewritten, each sampled token trained once."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.orchestrator.samples import (
    contexts_of,
    group_samples,
    rollout_samples,
    sampled_alternatives,
    sampled_logprobs,
)
from mettle.orchestrator.services import InMemoryServices
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw, Turn
from mettle.records.tokens import SampledBy


def turn(prefix_length, prompt, completion, version=3, temperature=1.0):
    count = len(completion)
    return Turn(
        prefix_length, np.array(prompt, np.int32), np.array(completion, np.int32),
        np.linspace(-0.1, -0.9, count, dtype=np.float32), np.full(count, version, np.int32), temperature,
    )  # fmt: skip


def rollout(*turns, advantage=0.5, reward=1.0):
    credit = advantage if advantage is None or isinstance(advantage, dict) else {"advantages": advantage}
    return RolloutRecord("r", reward, {}, [], tuple(turns), credit=credit)


def samples(*turns, seq_len=100, **values):
    return rollout_samples(rollout(*turns, **values), draw_id=7, seq_len=seq_len)


def test_one_turn_is_one_sample_with_the_sampled_tokens_masked_in():
    (sample,) = samples(turn(0, [1, 2, 3], [4, 5], temperature=0.7))
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
    assert sample.logprobs.tolist() == pytest.approx([0, 0, 0, -0.1, -0.9])
    assert sample.versions.tolist() == [-1, -1, -1, 3, 3]
    assert sample.temperatures.tolist() == pytest.approx([1, 1, 1, 0.7, 0.7])
    assert sample.advantages.tolist() == [0, 0, 0, 0.5, 0.5]
    assert sample.rl_weights.tolist() == [0, 0, 0, 1, 1]
    assert not sample.ce_weights.any()
    assert not sample.ref_kl_weights.any()
    assert (sample.draw_id, sample.rollout_id, sample.oldest_version) == (7, "r", 3)


def test_a_turn_that_continues_extends_the_sample():
    (sample,) = samples(turn(0, [1, 2], [3, 4]), turn(4, [5, 6], [7], version=4))
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert np.flatnonzero(sample.loss_mask).tolist() == [2, 3, 6]
    assert sample.oldest_version == 3


def test_a_rewritten_turn_branches_and_shared_sampled_tokens_train_once():
    first, second = samples(turn(0, [1, 2], [3, 4]), turn(3, [9], [7, 8]))
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert second.token_ids.tolist() == [1, 2, 3, 9, 7, 8]
    assert np.flatnonzero(first.loss_mask).tolist() == [2, 3]
    assert np.flatnonzero(second.loss_mask).tolist() == [4, 5]


def test_a_long_sample_is_cut_and_one_without_sampled_tokens_is_left_out():
    (sample,) = samples(turn(0, [1, 2, 3], [4, 5]), seq_len=4)
    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert samples(turn(0, [1, 2, 3], [4, 5]), seq_len=3) == []


class Echo:
    """A model whose log-probability of a token is the token itself; `asked` are the sequences that it read."""

    def __init__(self):
        self.asked = []

    async def logprobs(self, token_ids):
        self.asked.append(token_ids.tolist())
        return token_ids.astype(float)

    async def likeliest(self, token_ids, number):
        return token_ids[:, None] + np.arange(number), (await self.logprobs(token_ids))[:, None] - np.arange(number)


@pytest.mark.parametrize("before", [None, [], [50, 60, 70]])
def test_another_model_reads_each_turn_behind_what_is_put_ahead_and_answers_for_the_sampled_tokens(before):
    turns = (turn(0, [1, 2], [3, 4]), turn(3, [9], [7, 8, 6]), turn(7, [11], [12]))
    ahead, model = None if before is None else np.array(before, np.int32), Echo()
    found = asyncio.run(sampled_logprobs(turns, model, ahead))
    assert [part.tolist() for part in found] == [[3, 4], [7, 8, 6], [12]]
    assert model.asked == [[*(before or []), *ids] for ids in ([1, 2, 3, 4], [1, 2, 3, 9, 7, 8, 6, 11, 12])]
    told = asyncio.run(sampled_alternatives(turns, model, 2, ahead))
    assert [ids.tolist() for ids, _ in told] == [[[3, 4], [4, 5]], [[7, 8], [8, 9], [6, 7]], [[12, 13]]]
    assert [logprobs[:, 1].tolist() for _, logprobs in told] == [[2, 3], [6, 7, 5], [11]]


def test_contexts_are_all_that_the_policy_saw_before_each_completion():
    found = contexts_of((turn(0, [], [3, 4]), turn(1, [9], [7]), turn(3, [5], [6])))
    assert [context.tolist() for context in found] == [[], [3, 9], [3, 9, 7, 5]]


def test_experts_are_unknown_where_a_turn_has_none_and_a_token_was_not_sampled():
    first, second = turn(0, [1, 2], [3, 4]), turn(4, [5], [6])
    (plain,) = samples(first, second)
    assert plain.experts.shape == (6, 0)
    (sample,) = samples(first, replace(second, experts=np.array([[7, 1, 3]], np.int16)))
    assert sample.experts.tolist() == [[-1, -1, -1]] * 5 + [[7, 1, 3]]


def test_who_sampled_which_tokens_is_told_where_it_is_known():
    turns = (turn(0, [1, 2], [3, 4]), replace(turn(4, [5], [6, 7]), replica="replica-1"))
    (sample,) = samples(*turns)
    assert sample.replicas == (SampledBy(5, 7, "replica-1"),)
    (cut,) = samples(*turns, seq_len=6)
    assert cut.replicas == (SampledBy(5, 6, "replica-1"),)


def test_turns_that_cannot_follow_are_an_error():
    with pytest.raises(ValueError, match="continues 5 tokens of a sequence of 3"):
        samples(turn(0, [1, 2], [3]), turn(5, [4], [5]))
    with pytest.raises(ValueError, match="never seen"):
        samples(turn(2, [1], [2]))


def test_a_group_gives_samples_of_rollouts_with_an_advantage():
    draw = TaskDraw(7, "words", "u", 0, 0)
    members = (
        rollout(turn(0, [1], [2]), advantage=0.5),
        rollout(turn(0, [1], [3]), advantage=0.0),
        rollout(turn(0, [1], [4]), advantage=None, reward=None),
    )
    group = GroupRecord(draw, 0, members)
    assert len(group_samples(group, seq_len=9, keep_zero_advantages=False)) == 1
    assert len(group_samples(group, seq_len=9, keep_zero_advantages=True)) == 2


def test_credit_is_said_by_rollout_by_turn_or_by_token():
    credit = {
        "advantages": (0.5, np.array([1.0, -1.0], np.float32)),
        "ref_kl_weights": 2.0,
        "ref_logprobs": (np.array([-1.0, -2.0], np.float32), -3.0),
        "ce_weights": (0.0, np.array([0.25, 0.0, 0.0], np.float32)),  # the last token of the prompt, too
    }
    (sample,) = samples(turn(0, [1, 2], [3, 4]), turn(4, [5, 6], [7, 8]), advantage=credit)
    assert sample.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0, 1, -1]
    assert sample.rl_weights.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert sample.ref_kl_weights.tolist() == [0, 0, 2, 2, 0, 0, 2, 2]
    assert sample.ref_logprobs.tolist() == [0, 0, -1, -2, 0, 0, -3, -3]
    assert sample.ce_weights.tolist() == [0, 0, 0, 0, 0, 0.25, 0, 0]
    (cut,) = samples(turn(0, [1, 2], [3, 4]), turn(4, [5, 6], [7, 8]), advantage=credit, seq_len=7)
    assert cut.advantages.tolist() == sample.advantages.tolist()[:7]
    assert cut.ce_weights.tolist() == sample.ce_weights.tolist()[:7]


def test_given_weights_of_the_policy_gradient_take_the_place_of_the_usual_ones():
    (sample,) = samples(turn(0, [1], [2, 3]), advantage={"advantages": 1.0, "rl_weights": 0.5})
    assert sample.rl_weights.tolist() == [0, 0.5, 0.5]
    (pulled,) = samples(turn(0, [1], [2, 3]), advantage={"ref_kl_weights": 1.0, "ref_logprobs": -1.0})
    assert not pulled.rl_weights.any()


async def test_a_frozen_model_reads_each_token_in_the_context_that_it_was_sampled_in():
    seen = []

    def score(ids):
        seen.append(ids.tolist())
        return -ids.astype(np.float32)

    model = InMemoryServices({"m": score}).model("m")
    found = await sampled_logprobs((turn(0, [1, 2], [3, 4]), turn(4, [5], [6]), turn(3, [9], [7, 8])), model)
    assert seen == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 7, 8]]
    assert [values.tolist() for values in found] == [[-3, -4], [-6], [-7, -8]]


@st.composite
def conversations(draw):
    """Turns with random rewrites, the whole sequence that each of them ends with, and where its tokens were sampled."""
    turns, wholes, whole, next_id = [], [], [], 0
    for _ in range(draw(st.integers(1, 6))):
        prefix = draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole)))) if turns else 0
        added = draw(st.integers(0 if prefix else 1, 4))
        sampled = draw(st.integers(1, 4))
        prompt = list(range(next_id, next_id + added))
        completion = list(range(next_id + added, next_id + added + sampled))
        next_id += added + sampled
        turns.append(turn(prefix, prompt, completion))
        whole = whole[:prefix] + prompt + completion
        wholes.append(whole)
    return turns, wholes


@given(conversations())
def test_each_sampled_token_trains_once_after_the_context_that_the_model_saw(conversation):
    turns, wholes = conversation
    trained = []
    for sample in samples(*turns):
        ids = sample.token_ids.tolist()
        assert any(ids == whole for whole in wholes)
        for position in np.flatnonzero(sample.loss_mask):
            trained.append(ids[position])
            seen = next(w for w, t in zip(wholes, turns, strict=True) if ids[position] in t.completion_ids)
            assert ids[: position + 1] == seen[: position + 1]
    assert sorted(trained) == sorted(token for t in turns for token in t.completion_ids.tolist())
