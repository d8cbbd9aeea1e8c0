"""Algorithms: properties that hold for every one that is registered, and each formula against its NumPy twin."""

import asyncio
import inspect
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.config import plugins
from mettle.errors import UserError
from mettle.orchestrator.algorithms import ALGORITHMS, Algorithm, RunAlgorithms, check_choice, make_algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.credit import checked, fill_columns, has_signal, mean_advantage
from mettle.orchestrator.samples import group_samples
from mettle.orchestrator.services import InMemoryServices
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw, Turn
from mettle.records.tokens import CREDIT_COLUMNS, WIDE_COLUMNS, filled
from mettle.storage.shards import decode_group, encode_group

VOCABULARY = 24


def told(ids):
    """A model of few words: how likely a token is depends on it and, a little, on how many came before."""
    return (-0.1 * (ids % 7) - 0.001 * np.arange(len(ids))).astype(np.float32)


SERVICES = InMemoryServices(
    {"reference": lambda ids: -0.1 * (ids % 7).astype(np.float32), "teacher": told, "policy": told},
    vocab_size=VOCABULARY,
)

reward = st.floats(-10, 10, allow_nan=False)
rewards = st.lists(st.none() | reward, min_size=1, max_size=16)


def turn(number=0, *, num_tokens=2, reward=None, advantage=None):
    ids = np.arange(num_tokens, dtype=np.int32) + 10 * number
    return Turn(
        5 * number, np.full(3, number, np.int32), ids, np.full(num_tokens, -0.5, np.float32),
        np.zeros(num_tokens, np.int32), 1.0, reward, advantage,
    )  # fmt: skip


def rollout(reward, *turns, name="r", advantage=None):
    return RolloutRecord(name, reward, {}, [], turns or (turn(),), advantage=advantage)


def group(rollouts, env_id="e"):
    return GroupRecord(TaskDraw(1, env_id, "u", 0, 0), 0, tuple(rollouts))


def of_rewards(values, env_id="e"):
    """A group with these rewards, whose environment says of its steps what scoring would make of them."""
    scored = [value for value in values if value is not None]
    mean = math.fsum(scored) / len(scored) if scored else 0.0
    return group(
        [
            rollout(value, name=f"r{i}", advantage=None if value is None else value - mean)
            for i, value in enumerate(values)
        ],
        env_id,
    )


def credited(algorithm, record):
    return checked(asyncio.run(algorithm.credit(record, SERVICES)), record)


def spread(algorithm, record):
    """All that a group's tokens are credited with: an array [tokens, columns] a rollout, None where it does not train."""
    found = []
    for member, credit in zip(record.rollouts, credited(algorithm, record), strict=True):
        rows = []
        for index, each in enumerate(member.turns):
            length = len(each.new_prompt_ids) + len(each.completion_ids)
            columns = filled(length, {})
            if credit is not None:
                fill_columns(columns, credit, index, each, slice(len(each.new_prompt_ids), length))
            rows.append(np.stack([columns[name] for name in CREDIT_COLUMNS if name not in WIDE_COLUMNS], axis=1))
        found.append(None if credit is None else np.concatenate(rows))
    return found


def same(left, right):
    return len(left) == len(right) and all(
        (a is None and b is None) or np.allclose(a, b, atol=1e-5) for a, b in zip(left, right, strict=True)
    )


def advantages(name, values, env_id="e", **options):
    """Of an algorithm that gives each rollout one advantage."""
    found = credited(make_algorithm(name, options), of_rewards(values, env_id))
    return [None if credit is None else mean_advantage(credit, rollout(0.0)) for credit in found]


# Every algorithm


@pytest.mark.parametrize("name", ALGORITHMS.names())
@settings(max_examples=30, deadline=None)
@given(values=rewards)
def test_errored_rollouts_do_not_train_and_do_not_shift_what_the_rest_get(name, values):
    survivors = [r for r in values if r is not None]
    found = spread(make_algorithm(name, {}), of_rewards(values))
    assert [a is None for a in found] == [r is None for r in values]
    assert same([a for a in found if a is not None], spread(make_algorithm(name, {}), of_rewards(survivors)))


@pytest.mark.parametrize("name", ALGORITHMS.names())
@settings(max_examples=30, deadline=None)
@given(values=rewards, seed=st.integers(0, 100))
def test_a_permutation_of_the_rollouts_permutes_their_credit(name, values, seed):
    if make_algorithm(name, {}).state():
        return  # what it keeps moves from rollout to rollout, in their order
    order = np.random.default_rng(seed).permutation(len(values)).tolist()
    found = spread(make_algorithm(name, {}), of_rewards(values))
    assert same([found[i] for i in order], spread(make_algorithm(name, {}), of_rewards([values[i] for i in order])))


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_equal_rewards_give_no_signal_where_rewards_are_compared(name):
    algorithm = make_algorithm(name, {})
    record = of_rewards([0.1 + 0.2, 0.3, 0.3])
    found = credited(algorithm, record)
    if algorithm.min_group_size > 1:
        assert all(credit["advantages"] in (0.0, (0.0,)) for credit in found)
        assert not any(map(has_signal, found, record.rollouts))


@pytest.mark.parametrize("name", ALGORITHMS.names())
@settings(max_examples=30, deadline=None)
@given(values=rewards)
def test_an_algorithm_goes_on_where_it_was_saved(name, values):
    first, second = make_algorithm(name, {}), make_algorithm(name, {})
    credited(first, of_rewards(values))
    second.restore(json.loads(json.dumps(first.state())))
    assert same(spread(first, of_rewards([0.5, 1.0])), spread(second, of_rewards([0.5, 1.0])))


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_credit_is_said_in_columns_that_exist_and_only_of_what_was_sampled(name):
    for found in spread(make_algorithm(name, {}), of_rewards([1.0, 0.0, 0.5])):
        assert np.isfinite(found).all()
        assert not found[:3].any()  # the prompt


# Each formula


PINNED = json.loads((Path(__file__).parent / "pinned.json").read_text())


@pytest.mark.parametrize("case", PINNED["algorithms"], ids=lambda c: c["name"] + str(c["args"]))
def test_the_first_three_algorithms_give_the_numbers_that_they_gave_when_they_saw_rewards_alone(case):
    algorithm = make_algorithm(case["name"], case["args"])
    for (env_id, values), expected in zip(PINNED["cases"], case["advantages"], strict=True):
        found = credited(algorithm, of_rewards(values, env_id))
        assert [None if credit is None else credit["advantages"] for credit in found] == expected


def test_grpo_is_reward_minus_mean():
    assert advantages("grpo", [1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


@given(st.lists(reward, min_size=2, max_size=16))
def test_scaled_advantages_have_unit_spread(values):
    found = group_advantages(values, scale_by_std=True)
    if any(found):
        assert math.isclose(math.sqrt(sum(a * a for a in found) / len(found)), 1.0, rel_tol=1e-6)


def test_max_rl_divides_by_the_mean_and_is_silent_without_success():
    assert advantages("max_rl", [1.0, 0.0, 0.0, 0.0]) == [3.0, -1.0, -1.0, -1.0]
    assert advantages("max_rl", [0.0, 0.0]) == [0.0, 0.0]
    assert advantages("max_rl", [-1.0, 1.0]) == [0.0, 0.0]


def test_rae_compares_before_the_baseline_moves_and_keeps_one_an_environment():
    rae = make_algorithm("rae", {"decay": 0.5})

    def found(env_id, values):
        return [credit["advantages"] for credit in credited(rae, of_rewards(values, env_id))]

    assert found("a", [1.0, 1.0]) == [1.0, 0.5]
    assert found("b", [1.0]) == [1.0]
    assert found("a", [1.0]) == [0.25]


def turn_returns_twin(table, discount):
    """[rollouts, turns] of rewards, NaN where there is no such turn, to advantages of the same shape."""
    returns, following = np.full_like(table, np.nan), np.zeros(len(table))
    for t in reversed(range(table.shape[1])):
        following = np.where(np.isnan(table[:, t]), 0.0, table[:, t] + discount * following)
        returns[:, t] = np.where(np.isnan(table[:, t]), np.nan, following)
    with np.errstate(invalid="ignore"):
        return returns - [np.nanmean(c) if np.isfinite(c).any() else np.nan for c in returns.T]


@given(seed=st.integers(0, 1000), discount=st.sampled_from([0.0, 0.5, 1.0]))
def test_turn_returns_equal_their_numpy_twin(seed, discount):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, rng.integers(2, 6))
    table = np.full((len(lengths), 4), np.nan)
    members = []
    for i, length in enumerate(lengths):
        table[i, :length] = rng.normal(size=length).round(3)
        members.append(rollout(table[i, :length].sum(), *(turn(t, reward=table[i, t]) for t in range(length))))
    found = credited(make_algorithm("turn_returns", {"discount": discount}), group(members))
    for credit, length, expected in zip(found, lengths, turn_returns_twin(table, discount), strict=True):
        np.testing.assert_allclose(credit["advantages"], expected[:length], atol=1e-9)


def test_turn_returns_are_grpo_where_only_the_end_is_rewarded():
    members = [rollout(value, turn(0), turn(1)) for value in (1.0, 0.0, 0.5)]
    found = credited(make_algorithm("turn_returns", {}), group(members))
    assert [credit["advantages"] for credit in found] == [(a, a) for a in group_advantages([1.0, 0.0, 0.5])]


def test_a_reference_scores_what_was_sampled_in_its_context():
    members = [rollout(1.0, turn(0), turn(1), name="a"), rollout(None, name="b"), rollout(0.0, turn(0), name="c")]
    first, none, last = credited(make_algorithm("reference_kl", {"weight": 0.5}), group(members))
    assert none is None
    assert first["ref_kl_weights"] == last["ref_kl_weights"] == 0.5
    assert "advantages" not in first
    for scored, each in zip(first["ref_logprobs"], members[0].turns, strict=True):
        np.testing.assert_allclose(scored, -0.1 * (each.completion_ids % 7))
    both = credited(make_algorithm("reference_kl", {"reward_weight": 2.0}), group(members))
    assert [both[0]["advantages"], both[2]["advantages"]] == [1.0, -1.0]


def likeliest_twin(contexts, number, ahead=0):
    """What `told` would likeliest say after each context: every token tried, the best `number` kept."""
    ids, logprobs = [], []
    for context in contexts:
        tried = np.array([-0.1 * (token % 7) - 0.001 * (ahead + context) for token in range(VOCABULARY)], np.float32)
        order = np.argsort(-tried, kind="stable")[:number]
        ids.append(order)
        logprobs.append(tried[order])
    return np.array(ids), np.array(logprobs)


def test_a_teacher_lists_its_likeliest_tokens_in_the_place_of_each_sampled_one():
    members = [rollout(1.0, turn(0), turn(1), name="a"), rollout(None, name="b"), rollout(0.0, turn(0), name="c")]
    first, none, last = credited(make_algorithm("distillation", {"top_k": 3, "weight": 0.5}), group(members))
    assert none is None
    assert first["distill_weights"] == last["distill_weights"] == 0.5
    for number, (begin, ids, logprobs) in enumerate(
        zip((3, 8), first["teacher_ids"], first["teacher_logprobs"], strict=True)
    ):
        expected = likeliest_twin([begin, begin + 1], 3)
        np.testing.assert_array_equal(ids, expected[0], err_msg=str(number))
        np.testing.assert_allclose(logprobs, expected[1], atol=1e-6)
    assert has_signal(first, members[0])
    # The trainer's own teacher asks nothing here; rewards count besides where they are wanted.
    whole = credited(make_algorithm("distillation", {"reward_weight": 2.0}), group(members))
    assert whole[0] == {"distill_weights": 1.0, "advantages": 1.0}


def test_a_list_goes_from_the_credit_to_the_tokens_of_a_sample():
    members = [rollout(1.0, turn(0), turn(1), name="a")]
    record = group(members)
    (credit,) = credited(make_algorithm("distillation", {"top_k": 3}), record)
    stored = decode_group(encode_group(replace(record, rollouts=(replace(members[0], credit=credit),))))
    (sample,) = group_samples(stored, seq_len=9, keep_zero_advantages=False)
    assert sample.teacher_ids.shape == sample.teacher_logprobs.shape == (9, 3)
    assert np.isfinite(sample.teacher_logprobs).all(1).tolist() == sample.loss_mask.tolist()
    np.testing.assert_array_equal(sample.teacher_ids[sample.loss_mask], likeliest_twin([3, 4, 8], 3)[0])
    np.testing.assert_array_equal(sample.distill_weights, sample.loss_mask)


def test_who_is_told_the_answer_teaches_who_was_not():
    def member(reward, name, **fields):
        return replace(rollout(reward, turn(0), turn(1), name=name), **fields)

    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}]
    members = [
        member(1.0, "a", answer="7", info={"tip": "odd"}, messages=said, num_prompt_messages=1),
        member(0.0, "b", answer="7"),
        member(None, "c", answer="7"),
    ]
    before = len("The answer is: 7")
    found = credited(make_algorithm("self_distillation", {}), group(members))
    assert found[2] is None
    assert found[0]["ref_kl_weights"] == 1.0
    for scored, each, begin in zip(found[0]["ref_logprobs"], members[0].turns, (3, 8), strict=True):
        expected = -0.1 * (each.completion_ids % 7) - 0.001 * (before + begin + np.arange(2))
        np.testing.assert_allclose(scored, expected, atol=1e-6)
    by_list = credited(make_algorithm("self_distillation", {"top_k": 2}), group(members))
    np.testing.assert_allclose(by_list[1]["teacher_logprobs"][1], likeliest_twin([8, 9], 2, before)[1], atol=1e-6)
    # Whoever has no hint has no teacher: `tip` is in one info alone, and the best rollout has nobody above it.
    tipped = credited(make_algorithm("self_distillation", {"hint": "tip", "reward_weight": 1.0}), group(members))
    assert [sorted(credit) for credit in tipped[:2]] == [
        ["advantages", "ref_kl_weights", "ref_logprobs"],
        ["advantages"],
    ]
    best = credited(make_algorithm("self_distillation", {"hint": "best", "template": "{hint}"}), group(members))
    assert best[0] == {}
    assert best[1]["ref_logprobs"][0][0] == pytest.approx(-0.1 * 0 - 0.001 * (len("so") + 3))


def test_what_the_environment_gave_stands():
    own = make_algorithm("environment", {})
    by_turn = rollout(1.0, turn(0, advantage=0.7), turn(1, advantage=-0.2), advantage=0.5)
    whole = rollout(0.0, turn(0, advantage=-0.5), turn(1, advantage=-0.5), advantage=3.0)  # its steps inherited theirs
    found = credited(own, group([by_turn, whole]))
    assert [credit["advantages"] for credit in found] == [(0.7, -0.2), 3.0]
    with pytest.raises(UserError, match="'e' gave a rollout a reward and no advantage"):
        credited(own, group([rollout(1.0)]))


# The NumPy twin of each, on groups of several turns: [rollouts] of lists by turn. `kept` are the rollouts that have a
# reward, `r` [kept] those rewards.


def compared(values, *, by_std=False):
    """Values [n], NaN where there is none, less their mean."""
    with np.errstate(invalid="ignore", divide="ignore"):
        known = values[np.isfinite(values)]
        if not len(known) or np.ptp(known) <= 1e-6:
            return np.where(np.isfinite(values), 0.0, np.nan)
        return (values - known.mean()) / (known.std() if by_std else 1.0)


def by_rollout(found):
    return lambda kept, r, **options: [
        np.full(len(m.turns), a) for m, a in zip(kept, found(kept, r, **options), strict=True)
    ]


def lengths_of(kept):
    return np.array([m.num_completion_tokens for m in kept], float)


def grpo_twin(kept, r, scale_by_std=False, length_penalty=None):
    if length_penalty:
        tokens_in = np.array([sum(len(t.new_prompt_ids) for t in m.turns) for m in kept], float)
        parts = {"output": lengths_of(kept), "input": tokens_in, "turns": np.array([len(m.turns) for m in kept], float)}
        r = r - r.mean() * sum(w * parts[name] / max(1.0, parts[name].max()) for name, w in length_penalty.items())
    return compared(r, by_std=scale_by_std)


def opo_twin(kept, r):
    weights = lengths_of(kept)
    return np.zeros(len(r)) if np.ptp(r) <= 1e-6 else r - (weights * r).sum() / weights.sum()


def dapo_twin(kept, r, max_tokens=None, buffer_tokens=None, overlong_penalty=1.0):
    over = 0.0
    if max_tokens:
        over = np.clip((max_tokens - buffer_tokens - lengths_of(kept)) / buffer_tokens, -1, 0)
    return np.zeros(len(r)) if np.ptp(r) <= 1e-6 else compared(r + overlong_penalty * over, by_std=True)


def max_rl_twin(kept, r):
    return compared(r) / r.mean() if r.mean() > 0 else np.zeros(len(r))


def rae_twin(kept, r, decay=0.95):
    baseline, found = 0.0, []
    for value in r:
        found.append(value - baseline)
        baseline = decay * baseline + (1 - decay) * value
    return found


def global_twin(kept, r):  # of the first group that an algorithm sees
    return compared(r) / (r.std() if r.std() > 1e-6 else 1.0)


def hierarchical_twin(kept, r):
    found = np.zeros(len(r))
    for agent in {m.info["agent"] for m in kept}:
        chosen = np.array([m.info["agent"] == agent for m in kept])
        found[chosen] = compared(r[chosen])
    return found


def returns_of(member, discount):
    rewards = [t.reward for t in member.turns]
    if all(value is None for value in rewards):
        rewards[-1] = member.reward
    return [sum(discount ** (s - t) * (rewards[s] or 0.0) for s in range(t, len(rewards))) for t in range(len(rewards))]


def turns_twin(kept, table, *, by_std=False):
    """Each turn against the same turn: [kept] lists, None where there is nothing to compare."""
    width = max(map(len, table))
    padded = np.array([[np.nan if v is None else v for v in row] + [np.nan] * (width - len(row)) for row in table])
    found = np.array([compared(column, by_std=by_std) for column in padded.T]).T
    return [np.nan_to_num(row[: len(m.turns)]) for row, m in zip(found, kept, strict=True)]


def turn_grpo_twin(kept, r, turn_weight=1.0, outcome_weight=1.0, scale_by_std=False):
    own = turns_twin(kept, [[t.reward for t in m.turns] for m in kept], by_std=scale_by_std)
    return [outcome_weight * a + turn_weight * o for a, o in zip(compared(r, by_std=scale_by_std), own, strict=True)]


def seen_before(member, t, *, and_said=False):
    pieces = [ids for turn in member.turns[:t] for ids in (turn.new_prompt_ids, turn.completion_ids)]
    pieces += [member.turns[t].new_prompt_ids, member.turns[t].completion_ids][: 1 + and_said]
    return tuple(np.concatenate(pieces).tolist())


def gigpo_twin(kept, r, discount=0.95, step_weight=1.0, anchor="context"):
    places = [(i, t) for i, m in enumerate(kept) for t in range(len(m.turns))]
    state = {
        (i, t): seen_before(kept[i], t) if anchor == "context" else tuple(kept[i].turns[t].new_prompt_ids.tolist())
        for i, t in places
    }
    value = {(i, t): returns_of(kept[i], discount)[t] for i, t in places}
    found = [np.full(len(m.turns), a) for m, a in zip(kept, compared(r), strict=True)]
    for i, t in places:
        mates = np.array([value[p] for p in places if state[p] == state[i, t]])
        if np.ptp(mates) > 1e-6:
            found[i][t] += step_weight * (value[i, t] - mates.mean())
    return found


def tree_twin(kept, r, global_weight=1.0, local_weight=1.0):
    if np.ptp(r) <= 1e-6:
        return [np.zeros(len(m.turns)) for m in kept]

    def through(i, t):
        node = seen_before(kept[i], t, and_said=True)
        return np.array([seen_before(m, t, and_said=True) == node if t < len(m.turns) else False for m in kept])

    found = []
    for i, member in enumerate(kept):
        values = [r.mean(), *(r[through(i, t)].mean() for t in range(len(member.turns)))]
        found.append([
            (global_weight * (values[t + 1] - values[0]) + local_weight * (values[t + 1] - values[t]))
            / math.sqrt(through(i, t).sum())
            for t in range(len(member.turns))
        ])  # fmt: skip
    return found


TWINS = {
    "grpo": by_rollout(grpo_twin),
    "rloo": by_rollout(lambda kept, r: np.zeros(1) if len(r) == 1 else compared(r) * len(r) / (len(r) - 1)),
    "opo": by_rollout(opo_twin),
    "dapo": by_rollout(dapo_twin),
    "max_rl": by_rollout(max_rl_twin),
    "rae": by_rollout(rae_twin),
    "clipped_negatives": by_rollout(lambda kept, r, floor=0.0: np.maximum(compared(r), floor)),
    "global_std": by_rollout(global_twin),
    "reinforce_pp": by_rollout(lambda kept, r: compared(r, by_std=True)),
    "reinforce_pp_baseline": by_rollout(lambda kept, r: compared(r, by_std=True)),
    "hierarchical_grpo": by_rollout(hierarchical_twin),
    "turn_returns": lambda kept, r, discount=1.0: turns_twin(kept, [returns_of(m, discount) for m in kept]),
    "turn_grpo": turn_grpo_twin,
    "gigpo": gigpo_twin,
    "tree": tree_twin,
    "echo": by_rollout(lambda kept, r, weight=0.1: compared(r)),
    "imitation": by_rollout(lambda kept, r, min_reward=1.0: np.zeros(len(r))),
}
OPTIONS = [
    ("grpo", {"scale_by_std": True}),
    ("grpo", {"length_penalty": {"output": 0.25, "input": 0.1, "turns": 0.1}}),
    ("dapo", {"max_tokens": 6, "buffer_tokens": 4, "overlong_penalty": 0.5}),
    ("clipped_negatives", {"floor": -0.2}),
    ("rae", {"decay": 0.5}),
    ("turn_returns", {"discount": 0.5}),
    ("turn_grpo", {"turn_weight": 0.3, "outcome_weight": 2.0, "scale_by_std": True}),
    ("gigpo", {"discount": 1.0, "step_weight": 0.5, "anchor": "observation"}),
    ("tree", {"global_weight": 0.0}),
    ("echo", {"weight": 0.5}),
    ("imitation", {"min_reward": 0.5}),
]


def game(seed):
    """A group of several turns whose beginnings often agree, some with rewards of their own, some failed."""
    rng = np.random.default_rng(seed)
    has_steps, members = rng.random() < 0.7, []
    for i in range(rng.integers(2, 7)):
        turns, length = [], 0
        for t in range(rng.integers(1, 4)):
            said = rng.integers(0, 2, rng.integers(1, 3)).astype(np.int32)
            own = rng.choice([0.0, 0.5, 1.0]) if has_steps and rng.random() < 0.7 else None
            asked = np.arange(t + 2, dtype=np.int32)
            zeros = np.zeros(len(said), np.float32)
            turns.append(Turn(length, asked, said, zeros, zeros.astype(np.int32), 1.0, own))
            length += len(asked) + len(said)
        reward = None if rng.random() < 0.15 else float(rng.choice([0.0, 0.5, 1.0]))
        info = {"agent": str(rng.integers(0, 2))}
        members.append(RolloutRecord(f"r{i}", reward, {}, [], tuple(turns), info=info))
    return group(members)


def test_every_algorithm_has_a_numpy_twin():
    own_tests = {"environment", "reference_kl", "distillation", "self_distillation"}
    assert TWINS.keys() | own_tests == ALGORITHMS.built_in.keys()


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in sorted(TWINS)), *OPTIONS])
def test_advantages_of_several_turns_equal_their_numpy_twin(name, options):
    for seed in range(40):
        record = game(seed)
        if name == "rae":  # the twin knows one agent
            record = group([replace(m, info=None) for m in record.rollouts])
        kept = [m for m in record.rollouts if m.reward is not None]
        found = spread(make_algorithm(name, options), record)
        expected = iter(TWINS[name](kept, np.array([m.reward for m in kept]), **options) if kept else [])
        column = CREDIT_COLUMNS.index("advantages")
        for member, columns in zip(record.rollouts, found, strict=True):
            if member.reward is None:
                assert columns is None
                continue
            by_token = [
                np.concatenate([np.zeros(len(t.new_prompt_ids)), np.full(len(t.completion_ids), a)])
                for t, a in zip(member.turns, next(expected), strict=True)
            ]
            np.testing.assert_allclose(columns[:, column], np.concatenate(by_token), atol=1e-6)


def test_running_moments_are_those_of_the_weighted_rewards():
    algorithm = make_algorithm("reinforce_pp", {"decay": 0.9})
    groups = [[1.0, 0.0, 0.5], [0.0, 0.0], [2.0]]
    for values in groups:
        found = [credit["advantages"] for credit in credited(algorithm, of_rewards(values))]
    # A group's values count alike, and all that came before decays once for each of them.
    weights, after = [], 1.0
    for values in reversed(groups):
        weights = [after * (1 - 0.9 ** len(values)) / len(values)] * len(values) + weights
        after *= 0.9 ** len(values)
    flat, weights = np.concatenate(groups), np.array(weights)
    mean = (weights * flat).sum() / weights.sum()
    std = math.sqrt((weights * (flat - mean) ** 2).sum() / weights.sum())
    assert found == [pytest.approx((2.0 - mean) / std)]


def test_echo_imitates_what_was_answered_and_nothing_else():
    members = [rollout(value, turn(0), turn(1)) for value in (1.0, 0.0)]
    column = CREDIT_COLUMNS.index("ce_weights")
    for found in spread(make_algorithm("echo", {"weight": 0.5}), group(members)):
        assert found[:, column].tolist() == [0, 0, 0, 0, 0, 0.5, 0.5, 0.5, 0, 0]
    equal = group([rollout(1.0, turn(0), turn(1)) for _ in range(2)])
    for only, expected in ((False, True), (True, False)):
        algorithm = make_algorithm("echo", {"only_with_signal": only})
        assert any(map(has_signal, credited(algorithm, equal), equal.rollouts)) is expected


def test_imitation_takes_the_good_ones_or_the_best():
    def weights(values, **options):
        found = credited(make_algorithm("imitation", options), of_rewards(values))
        return [None if credit is None else credit["ce_weights"] for credit in found]

    assert weights([1.0, 0.5, None, 1.5]) == [1.0, 0.0, None, 1.0]
    assert weights([0.6, 0.9, 0.9], min_reward=0.5, best_only=True, weight=2.0) == [0.0, 2.0, 0.0]
    assert weights([0.1, 0.2], best_only=True) == [0.0, 0.0]


def test_agents_have_baselines_of_their_own():
    rae = make_algorithm("rae", {"decay": 0.5})
    members = [replace(rollout(1.0, name=n), info={"agent": n}) for n in ("first", "second", "first")]
    assert [credit["advantages"] for credit in credited(rae, group(members))] == [1.0, 1.0, 0.5]
    assert rae.state() == {"baselines": {"e/first": 0.75, "e/second": 0.5}}


def test_agents_can_be_compared_within_their_episode():
    def member(value, agent, episode):
        return replace(rollout(value, name=f"{agent}{episode}{value}"), info={"agent": agent, "episode": episode})

    record = group([member(1, "a", 0), member(0, "a", 0), member(0.5, "a", 1), member(1, "b", 0), member(0, "b", 1)])
    found = credited(make_algorithm("hierarchical_grpo", {"episode_agents": ["a"]}), record)
    assert [credit["advantages"] for credit in found] == [0.5, -0.5, 0.0, 0.5, -0.5]
    unnamed = group([replace(rollout(1.0), info={"agent": "a"}), rollout(0.0)])
    with pytest.raises(ValueError, match="'a' is one of episode_agents, but the info of rollout r has no 'episode'"):
        credited(make_algorithm("hierarchical_grpo", {"episode_agents": ["a"]}), unnamed)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dapo", {"max_tokens": 5}, "give both, or neither"),
        ("dapo", {"max_tokens": 5, "buffer_tokens": 6}, "from 1 to max_tokens"),
        ("clipped_negatives", {"floor": 0.1}, "at most 0"),
        ("grpo", {"length_penalty": {"words": 1}}, "not for 'words'"),
        ("global_std", {"decay": 1.0}, r"in \[0, 1\)"),
        ("gigpo", {"anchor": "hash"}, "one of context, observation"),
        ("gigpo", {"discount": 1.5}, r"in \[0, 1\]"),
        ("echo", {"weight": 0}, "take grpo"),
        ("imitation", {"weight": 0}, "nothing would train"),
        ("distillation", {"top_k": 21}, "1 to 20, as endpoints list no more"),
        ("distillation", {"weight": 0}, "take grpo"),
        ("self_distillation", {"template": "think"}, "the teacher knows nothing more"),
        ("reference_kl", {"weight": 0}, "take grpo"),
        ("turn_grpo", {"turn_weight": 0, "outcome_weight": 0.0}, "are both 0, so every advantage is"),
        ("tree", {"global_weight": 0, "local_weight": 0}, "are both 0, so every advantage is"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        make_algorithm(name, options)


# Names, options, and what a config may ask for


def test_an_unknown_algorithm_names_those_there_are():
    with pytest.raises(ValueError, match=r"no algorithm 'ppo'; there are clipped_negatives, dapo.*rloo.*module:attr"):
        make_algorithm("ppo", {})


def test_an_unknown_option_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"'grpo' takes no option 'clip'; it takes scale_by_std, length_penalty"):
        make_algorithm("grpo", {"clip": 1})
    with pytest.raises(ValueError, match=r"'scale_by_sdt'; did you mean 'scale_by_std'\?"):
        make_algorithm("grpo", {"scale_by_sdt": True})


WRONG = {"bool": "maybe", "float": "much", "int | None": 2.5, "str": 3, "Sequence[str]": "solver"}
WRONG |= {"Mapping[str, float] | None": {"output": "long"}}
"""For each annotation of an option a value that it does not mean, some of which would pass for one in Python."""


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_an_option_of_another_type_is_refused_by_its_name(name):
    for option, parameter in inspect.signature(ALGORITHMS.find(name)).parameters.items():
        with pytest.raises(ValueError, match=rf"^algorithm_args: {option} = .* of algorithm '{name}': "):
            make_algorithm(name, {option: WRONG[parameter.annotation]})
        if parameter.annotation == "float":
            with pytest.raises(ValueError, match="finite number"):
                make_algorithm(name, {option: math.nan})


class Own(Algorithm):
    """Not Mettle's: one argument is annotated, one is not, one names what only a type checker knows."""

    def __init__(self, scale: "float", odd: "Unknown" = None, *, plain=1):  # noqa: F821
        self.options = (scale, odd, plain)


def own_without_types(**options):
    return Own(1.0, plain=options)


def test_the_options_of_an_algorithm_of_ones_own_are_those_of_its_arguments():
    here = f"{__name__}:Own"
    assert make_algorithm(here, {"scale": 2, "plain": "x"}).options == (2, None, "x")
    assert make_algorithm(f"{__name__}:own_without_types", {"any": 1}).options == (1.0, None, {"any": 1})
    with pytest.raises(ValueError, match="wants the option 'scale', which has no default"):
        make_algorithm(here, {})
    with pytest.raises(ValueError, match="is no subclass of"):
        make_algorithm("json:loads", {"s": "1"})


def check(name, *, group_size=8, temperature=1.0, services=(), **options):
    check_choice(name, options, group_size=group_size, temperature=temperature, services=services)


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_a_group_of_one_is_refused_where_rollouts_are_compared(name):
    if make_algorithm(name, {}).min_group_size == 1:
        check(name, group_size=1, services=("reference",))
        return
    with pytest.raises(ValueError, match="set group_size to at least 2"):
        check(name, group_size=1)


def test_a_frozen_model_that_is_not_configured_is_refused_in_one_line():
    with pytest.raises(
        ValueError, match=r"'teacher', which is not configured: add a table \[orchestrator.services.teac"
    ):
        check("reference_kl", reference="teacher", services=("other",))
    with pytest.raises(ValueError, match=r"scores at temperature 1: set sampling.temperature \(0.7\) to 1"):
        check("reference_kl", services=("reference",), temperature=0.7)
    check("reference_kl", services=("reference",))


def test_an_entry_point_or_a_path_names_an_algorithm_and_listing_does_not_import_it(monkeypatch):
    class Point:
        name = "mine"
        value = "mettle.orchestrator.algorithms.grpo:GRPO"

        def load(self):
            raise AssertionError("listing imports nothing")

    monkeypatch.setattr(plugins, "entry_points", lambda group: [Point()] if group == "mettle.algorithms" else [])
    assert "mine" in ALGORITHMS.names()
    for name in ("mine", "mettle.orchestrator.algorithms.grpo:GRPO"):
        assert advantages(name, [1.0, 0.0]) == [0.5, -0.5]
    with pytest.raises(ValueError, match="cannot be imported: No module named 'nowhere'"):
        make_algorithm("nowhere:Mine", {})
    with pytest.raises(ValueError, match="is no subclass of"):
        make_algorithm("builtins:dict", {})


def test_environments_with_the_same_choice_share_an_instance_and_its_state():
    choices = {"a": ("rae", {}), "b": ("rae", {}), "c": ("rae", {"decay": 0.5}), "d": ("grpo", {})}
    algorithms = RunAlgorithms(choices)
    assert algorithms.of("a") is algorithms.of("b")
    assert algorithms.of("a") is not algorithms.of("c")
    credited(algorithms.of("a"), of_rewards([1.0], "a"))
    credited(algorithms.of("c"), of_rewards([1.0], "c"))
    state = json.loads(json.dumps(algorithms.state()))
    assert set(state) == {"rae{}", 'rae{"decay": 0.5}'}
    other = RunAlgorithms(choices)
    other.restore({**state, "gone{}": {}})
    assert other.state() == state
