"""Advantages: errored rollouts, equal rewards, and each formula against its definition."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.orchestrator import algorithms
from mettle.orchestrator.algorithms import algorithm_names, check_options, make_algorithm
from mettle.orchestrator.algorithms.grpo import group_advantages

reward = st.floats(-10, 10, allow_nan=False)
rewards = st.lists(st.none() | reward, min_size=1, max_size=16)


@given(rewards)
def test_errored_rollouts_do_not_shift_the_baseline_of_the_rest(values):
    survivors = [r for r in values if r is not None]
    for name in ("grpo", "max_rl", "rae"):
        found = make_algorithm(name, {}).advantages("e", values)
        assert [a is None for a in found] == [r is None for r in values]
        assert [a for a in found if a is not None] == make_algorithm(name, {}).advantages("e", survivors)


def test_equal_rewards_give_exactly_zero():
    for name in ("grpo", "max_rl"):
        assert make_algorithm(name, {}).advantages("e", [0.1 + 0.2, 0.3, 0.3]) == [0.0, 0.0, 0.0]
    assert make_algorithm("grpo", {"scale_by_std": True}).advantages("e", [0.3, 0.3]) == [0.0, 0.0]


def test_grpo_is_reward_minus_mean():
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


@given(st.lists(reward, min_size=2, max_size=16))
def test_scaled_advantages_have_unit_spread(values):
    found = group_advantages(values, scale_by_std=True)
    if any(found):
        assert math.isclose(math.sqrt(sum(a * a for a in found) / len(found)), 1.0, rel_tol=1e-6)


def test_max_rl_divides_by_the_mean_and_is_silent_without_success():
    maximum_likelihood = make_algorithm("max_rl", {})
    assert maximum_likelihood.advantages("e", [1.0, 0.0, 0.0, 0.0]) == [3.0, -1.0, -1.0, -1.0]
    assert maximum_likelihood.advantages("e", [0.0, 0.0]) == [0.0, 0.0]
    assert maximum_likelihood.advantages("e", [-1.0, 1.0]) == [0.0, 0.0]


def test_rae_compares_before_the_baseline_moves_and_keeps_one_an_environment():
    rae = make_algorithm("rae", {"decay": 0.5})
    assert rae.advantages("a", [1.0, 1.0]) == [1.0, 0.5]
    assert rae.advantages("b", [1.0]) == [1.0]
    assert rae.advantages("a", [1.0]) == [0.25]


def test_rae_goes_on_where_it_was_saved():
    first, second = make_algorithm("rae", {}), make_algorithm("rae", {})
    first.advantages("a", [1.0, None, 0.0])
    second.restore(first.state())
    assert second.advantages("a", [0.5]) == first.advantages("a", [0.5])


def test_an_unknown_algorithm_names_those_there_are():
    with pytest.raises(ValueError, match=r"no algorithm 'ppo'; there are grpo, max_rl, rae"):
        make_algorithm("ppo", {})


def test_an_unknown_option_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"'grpo' does not take these options.*clip"):
        make_algorithm("grpo", {"clip": 1})


def test_a_group_of_one_is_refused_where_rollouts_are_compared():
    for name in ("grpo", "max_rl"):
        with pytest.raises(ValueError, match="set group_size to at least 2"):
            check_options(name, {}, 1)
    check_options("rae", {}, 1)


def test_an_entry_point_registers_an_algorithm_and_listing_does_not_import_it(monkeypatch):
    class Point:
        name = "mine"
        num_loaded = 0

        def load(self):
            Point.num_loaded += 1
            return algorithms.GRPO

    monkeypatch.setattr(algorithms, "entry_points", lambda group: [Point()])
    assert "mine" in algorithm_names()
    assert Point.num_loaded == 0
    assert make_algorithm("mine", {}).advantages("e", [1.0, 0.0]) == [0.5, -0.5]
