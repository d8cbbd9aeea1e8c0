"""States to records: token deltas, attribution of errors, plain messages."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mettle.envs.rollout_record import common_prefix, record_of_state, turns_of
from mettle.envs.rubrics.scoring import set_advantages
from mettle.envs.state import State
from mettle.errors import ProviderError, RolloutTimeout
from mettle.evals.source import GroupRequest, failed_rollouts
from mettle.orchestrator.batcher import ReadyGroup
from mettle.orchestrator.samples import rollout_samples
from mettle.orchestrator.shipping import assemble
from mettle.records.messages import AssistantMessage, ResponseTokens, UserMessage
from mettle.records.sampling import SamplingParams
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw
from mettle.storage.batches import read_batch, write_batch
from mettle.storage.shards import decode_group, encode_group


def plain(prompt, completion):
    """A call's tokens as a plain dict, as an environment of somebody else may keep them."""
    return {
        "prompt_ids": prompt,
        "completion_ids": completion,
        "completion_logprobs": [-0.5] * len(completion),
        "completion_versions": [2] * len(completion),
    }


def linked(calls):
    tokens, previous = [], None
    for prompt, completion in calls:
        made = ResponseTokens(prompt, completion, [-0.5] * len(completion), [2] * len(completion), previous=previous)
        tokens.append(made)
        previous = made
    return tokens


@st.composite
def calls(draw):
    """(prompt ids, completion ids) of successive calls that continue, rewrite, or start anew."""
    found, whole = [], []
    for _ in range(draw(st.integers(1, 5))):
        keep = draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
        prompt = whole[:keep] + draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        completion = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        found.append((prompt, completion))
        whole = prompt + completion
    return found


@given(calls())
def test_turns_give_back_the_prompts_that_the_model_saw(conversation):
    by_kind = [linked(conversation), [plain(*call) for call in conversation]]
    for tokens in [*by_kind, [by_kind[i % 2][i] for i in range(len(conversation))]]:
        turns = turns_of([{"tokens": t} for t in tokens], 0.8)
        whole = []
        for turn, (prompt, completion) in zip(turns, conversation, strict=True):
            whole = whole[: turn.prefix_length] + turn.new_prompt_ids.tolist() + turn.completion_ids.tolist()
            assert whole == prompt + completion
            assert turn.temperature == 0.8


def test_a_call_without_tokens_is_passed_over():
    first, second = plain([1], [2, 3]), plain([1, 2, 3, 4], [5])
    turns = turns_of([{"tokens": first}, {"tokens": None}, {"tokens": second}], 1.0)
    assert [turn.prefix_length for turn in turns] == [0, 3]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4))
def test_ids_that_the_policy_did_not_sample_are_context_wherever_they_stand(masks):
    previous, whole, expected, trajectory = None, [], [], []
    for number, mask in enumerate(masks):
        prompt, completion = [*whole, 100 + number], list(range(len(mask)))
        logprobs, versions = [-1.0 - i for i in completion], [2] * len(mask)
        previous = ResponseTokens(
            prompt, completion, logprobs, versions, previous=previous, completion_mask=list(map(int, mask))
        )
        assert previous["completion_mask"] == list(map(int, mask))
        trajectory.append({"tokens": previous})
        expected += [False, *mask]
        whole = prompt + completion
    state = {"reward": 1.0, "trajectory": trajectory}
    samples = rollout_samples(record_of_state(state, "t1-0"), draw_id=1, seq_len=1000)
    if not any(expected):
        assert samples == []
        return
    (sample,) = samples
    assert sample.token_ids.tolist() == whole
    assert sample.loss_mask.tolist() == expected
    assert all(sample.logprobs[i] == -1.0 - whole[i] for i in np.flatnonzero(expected))


@given(st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=1, max_size=4), st.sampled_from([0.0, 1.0]))
def test_a_turn_s_reward_is_what_the_environment_gave_it_and_never_the_rollout_s(given_rewards, reward):
    """Also where some turns have none, and where what they were given is by chance what the rollout earned."""
    state = State(trajectory=[], reward=reward)
    for number, due in enumerate(given_rewards):
        state["trajectory"].append({"tokens": plain([number], [1]), "reward": None})
        if due is not None:
            state.add_step_reward(due)
    set_advantages([state])
    record = record_of_state(state, "t1-0")
    assert [turn.reward for turn in record.turns] == given_rewards
    assert all(step["reward"] is not None for step in state["trajectory"])


def test_rewards_that_were_written_into_the_steps_are_their_own_beside_those_that_scoring_filled_in():
    steps = [{"tokens": plain([i], [1]), "reward": due} for i, due in enumerate([1.0, None])]
    state = State(trajectory=steps, reward=1.0)
    set_advantages([state])
    assert [turn.reward for turn in record_of_state(state, "t1-0").turns] == [1.0, None]
    # An environment that scores by itself, and gives all of its steps what the rollout earned, has said nothing of them.
    steps = [{"tokens": plain([i], [1]), "reward": 1.0} for i in range(2)]
    assert [turn.reward for turn in record_of_state(State(trajectory=steps, reward=1.0), "t1-0").turns] == [None, None]


def test_two_turns_become_one_sample():
    state = {"reward": 1.0, "trajectory": [{"tokens": t} for t in linked([([1, 2], [3]), ([1, 2, 3, 4], [5])])]}
    record = record_of_state(state, "t1-0")
    (sample,) = rollout_samples(record, draw_id=1, seq_len=10)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert np.flatnonzero(sample.loss_mask).tolist() == [2, 4]


def test_the_replica_of_each_call_comes_with_its_tokens_into_the_batch(tmp_path):
    first = ResponseTokens([1, 2], [3, 4], [-0.5] * 2, [2] * 2, replica="a")
    second = ResponseTokens([1, 2, 3, 4, 5], [6], [-0.5], [2], previous=first, completion_mask=[1], replica="b")
    masked = plain([1, 2, 3, 4, 5, 6], [7, 8, 9]) | {"completion_mask": [1, 0, 1], "replica": "c"}
    turns = turns_of([{"tokens": tokens} for tokens in (first, second, masked)], 1.0)
    assert [turn.replica for turn in turns] == ["a", "b", "c", "c"]
    record = RolloutRecord("r", 1.0, {}, [], turns, credit={"advantages": 1.0})
    block = encode_group(GroupRecord(TaskDraw(1, "e", "u", 0, 3), 0, (record,)))
    samples = rollout_samples(decode_group(block).rollouts[0], draw_id=1, seq_len=100)
    batch = assemble(3, [ReadyGroup.of(1, samples), ReadyGroup.of(2, samples)])
    digest, _ = write_batch(tmp_path, batch)
    spans = [(2, 4, "a"), (5, 6, "b"), (6, 7, "c"), (8, 9, "c")]
    assert read_batch(tmp_path, digest).replicas == (*spans, *((s + 9, e + 9, name) for s, e, name in spans))


def test_a_finished_state_becomes_a_record():
    state = {
        "prompt": [UserMessage(content="hi")],
        "completion": [AssistantMessage(content="ho")],
        "reward": 0.5,
        "metrics": {"exact": 1.0, "unknown": None},
        "trajectory": [],
        "stop_condition": "max_turns_reached",
        "is_truncated": True,
        "answer": "ho",
    }
    record = record_of_state(state, "t1-0")
    assert (record.reward, record.error_kind, record.is_truncated) == (0.5, None, True)
    assert record.metrics == {"exact": 1.0}
    assert record.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert all(type(message) is dict for message in record.messages)


def test_an_error_is_attributed_and_takes_the_reward_away():
    record = record_of_state({"reward": 1.0, "error": ProviderError("gone")}, "r")
    assert (record.reward, record.error_kind, record.error) == (None, "provider", "gone")
    record = record_of_state({"error": KeyError("x")}, "r")
    assert (record.error_kind, record.error) == ("environment", "KeyError: 'x'")


def test_a_state_without_reward_and_error_is_unscored():
    record = record_of_state({"reward": None}, "r")
    assert (record.error_kind, record.error) == ("unscored", None)
    assert record_of_state({"reward": float("nan")}, "r").error_kind == "unscored"


def test_what_the_environment_gave_each_step_is_kept_where_it_provides_advantages():
    first, second = linked([([1, 2], [3]), ([1, 2, 3, 4], [5, 6, 7])])
    second = {**plain([1, 2, 3, 4], [5, 6, 7]), "completion_mask": [1, 0, 1]}
    steps = [{"tokens": first, "reward": 0.5, "advantage": 1.0}, {"tokens": second, "reward": 2.0, "advantage": -1.0}]
    state = {"reward": 2.5, "trajectory": steps, "advantage": 3.0}
    given = record_of_state(state, "r", has_advantages=True)
    assert [(turn.reward, turn.advantage) for turn in given.turns] == [(0.5, 1.0), (None, -1.0), (2.0, -1.0)]
    assert given.advantage == 3.0
    rubrics = record_of_state(state, "r")
    assert {turn.advantage for turn in rubrics.turns} == {rubrics.advantage} == {None}


def test_a_group_that_came_to_nothing_has_one_record_a_rollout():
    request = GroupRequest("words", 0, "t9", 3, SamplingParams())
    records = failed_rollouts(request, RolloutTimeout("too late"))
    assert [r.rollout_id for r in records] == ["t9-0", "t9-1", "t9-2"]
    assert {r.error_kind for r in records} == {"timeout"}
    assert failed_rollouts(request, ValueError("x"))[0].error == "ValueError: x"


def test_common_prefix_counts_leading_ids_that_agree():
    assert common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert common_prefix(np.array([1]), np.array([1, 2])) == 1
    assert common_prefix(np.array([], dtype=np.int64), np.array([1])) == 0
