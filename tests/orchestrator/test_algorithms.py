"""Algorithms: properties that hold for every one that is registered, and each formula against its NumPy twin."""

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.config import plugins
from mettle.errors import UserError
from mettle.orchestrator.algorithms import ALGORITHMS, RunAlgorithms, check_choice, make_algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages
from mettle.orchestrator.credit import checked, fill_columns, has_signal, mean_advantage
from mettle.orchestrator.services import InMemoryServices
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw, Turn
from mettle.records.tokens import CREDIT_COLUMNS, filled

SERVICES = InMemoryServices({"reference": lambda ids: -0.1 * (ids % 7).astype(np.float32)})

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
            rows.append(np.stack([columns[name] for name in CREDIT_COLUMNS], axis=1))
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
@given(values=rewards)
def test_errored_rollouts_do_not_train_and_do_not_shift_what_the_rest_get(name, values):
    survivors = [r for r in values if r is not None]
    found = spread(make_algorithm(name, {}), of_rewards(values))
    assert [a is None for a in found] == [r is None for r in values]
    assert same([a for a in found if a is not None], spread(make_algorithm(name, {}), of_rewards(survivors)))


@pytest.mark.parametrize("name", ALGORITHMS.names())
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


def test_what_the_environment_gave_stands():
    own = make_algorithm("environment", {})
    by_turn = rollout(1.0, turn(0, advantage=0.7), turn(1, advantage=-0.2), advantage=0.5)
    whole = rollout(0.0, turn(0, advantage=-0.5), turn(1, advantage=-0.5), advantage=3.0)  # its steps inherited theirs
    found = credited(own, group([by_turn, whole]))
    assert [credit["advantages"] for credit in found] == [(0.7, -0.2), 3.0]
    with pytest.raises(UserError, match="'e' gave a rollout a reward and no advantage"):
        credited(own, group([rollout(1.0)]))


# Names, options, and what a config may ask for


def test_an_unknown_algorithm_names_those_there_are():
    with pytest.raises(ValueError, match=r"no algorithm 'ppo'; there are environment, grpo, max_rl, rae.*module:attr"):
        make_algorithm("ppo", {})


def test_an_unknown_option_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"'grpo' does not take these options.*clip"):
        make_algorithm("grpo", {"clip": 1})


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
