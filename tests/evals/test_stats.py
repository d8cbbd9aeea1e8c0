"""The statistics of evaluations against NumPy twins, tables, brute force and simulation."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.evals import stats

values = st.floats(-100, 100)
clusters = st.lists(st.lists(values, max_size=5), min_size=1, max_size=8)


@given(st.lists(values, min_size=1, max_size=30))
def test_a_distribution_is_that_of_numpy(numbers):
    seen = stats.distribution(numbers)
    assert seen is not None
    assert seen.num == len(numbers)
    assert seen.mean == pytest.approx(np.mean(numbers), abs=1e-9)
    assert (seen.min, seen.max) == (min(numbers), max(numbers))
    if len(numbers) > 1:
        assert seen.std == pytest.approx(np.std(numbers, ddof=1), abs=1e-7)
    else:
        assert seen.std is None


@given(st.lists(values, min_size=1, max_size=30), st.floats(0, 1))
def test_percentiles_are_those_of_numpy(numbers, q):
    assert stats.percentile(sorted(numbers), q) == pytest.approx(np.quantile(numbers, q), abs=1e-9)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(case):
    n, c, k = case
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert stats.pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert stats.pass_all_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws))


@given(st.integers(1, 6), st.floats(0.05, 0.95))
def test_pass_at_k_is_unbiased(n, p):
    for k in range(1, n + 1):
        expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * stats.pass_at_k(n, c, k) for c in range(n + 1))
        assert expected == pytest.approx(1 - (1 - p) ** k)


def test_k_goes_in_powers_of_two():
    assert [stats.powers_of_two(n) for n in (0, 1, 3, 8)] == [[], [1], [1, 2], [1, 2, 4, 8]]


@given(clusters)
def test_the_clustered_error_is_that_of_a_numpy_twin(groups):
    estimate = stats.clustered_mean(groups)
    flat = [value for group in groups for value in group]
    if not flat:
        assert estimate is None
        return
    assert estimate is not None
    assert estimate.mean == pytest.approx(np.mean(flat), abs=1e-9)
    used = [np.array(group) for group in groups if group]
    if len(used) < 2:
        assert estimate.standard_error is None
        assert estimate.interval is None
        return
    # The sandwich of a regression on a constant: X'X = n, meat = sum over clusters of (X'e)(X'e)'.
    mean = np.mean(flat)
    meat = sum(float((group - mean).sum()) ** 2 for group in used)
    expected = math.sqrt(len(used) / (len(used) - 1) * meat) / len(flat)
    assert estimate.standard_error == pytest.approx(expected, abs=1e-9)


@given(st.integers(2, 8), st.integers(1, 4), st.data())
def test_with_clusters_of_equal_size_the_error_is_that_of_the_task_means(num_tasks, size, data):
    groups = data.draw(st.lists(st.lists(values, min_size=size, max_size=size), min_size=num_tasks, max_size=num_tasks))
    estimate = stats.clustered_mean(groups)
    assert estimate is not None
    means = np.mean(groups, axis=1)
    assert estimate.standard_error == pytest.approx(means.std(ddof=1) / math.sqrt(num_tasks), abs=1e-7)


def test_repeating_each_rollout_adds_no_confidence():
    once = stats.clustered_mean([[0.2], [0.9], [0.4], [0.7]])
    often = stats.clustered_mean([[0.2] * 50, [0.9] * 50, [0.4] * 50, [0.7] * 50])
    assert once is not None
    assert often is not None
    assert often.interval == pytest.approx(once.interval)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Tasks of very different difficulty, eight rollouts each; an interval over rollouts would hold in half the cases."""
    rng = np.random.default_rng(7)
    held = naive = 0
    for _ in range(400):
        chances = rng.beta(0.6, 0.6, size=40)
        rollouts = rng.random((40, 8)) < chances[:, None]
        estimate = stats.clustered_mean(rollouts.astype(float).tolist())
        assert estimate is not None
        assert estimate.interval is not None
        held += estimate.interval[0] <= 0.5 <= estimate.interval[1]
        half = 1.96 * rollouts.std() / math.sqrt(rollouts.size)
        naive += abs(rollouts.mean() - 0.5) <= half
    assert 0.92 <= held / 400 <= 0.98
    assert naive / 400 < 0.75


def test_when_all_tasks_agree_the_interval_is_as_wide_as_that_many_draws():
    estimate = stats.clustered_mean([[1.0, 1.0]] * 10)
    assert estimate is not None
    assert estimate.standard_error == 0.0
    # Wilson's interval of 10 of 10: 1 / (1 + 1.96^2 / 10)
    assert estimate.interval == (pytest.approx(0.7225, abs=1e-4), 1.0)


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6), min_size=2, max_size=10))
def test_the_interval_of_a_share_stays_between_0_and_1_and_holds_the_mean(groups):
    estimate = stats.clustered_mean(groups)
    assert estimate is not None
    assert estimate.interval is not None
    low, high = estimate.interval
    assert 0 <= low <= estimate.mean + 1e-12
    assert estimate.mean - 1e-12 <= high <= 1


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (29, 2.04523), (120, 1.97993), (100_000, 1.95999)],
)
def test_quantiles_of_student_are_those_of_the_tables(degrees, expected):
    assert stats.student_t_quantile(0.975, degrees) == pytest.approx(expected, abs=2e-5)
    assert stats.student_t_cdf(expected, degrees) == pytest.approx(0.975, abs=1e-5)


def test_a_paired_difference_is_that_of_a_paired_t_test():
    # Student's sleep data, 1908: t = 4.0621, p = 0.002833, interval 0.70 to 2.46.
    before = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    after = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = stats.paired_difference(before, after)
    assert found is not None
    assert found.mean == pytest.approx(1.58)
    assert found.p_value == pytest.approx(0.002833, abs=1e-6)
    assert found.interval == (pytest.approx(0.7001, abs=1e-4), pytest.approx(2.4599, abs=1e-4))


def test_a_paired_interval_agrees_with_a_bootstrap_over_tasks():
    rng = np.random.default_rng(3)
    before = rng.random(200)
    after = np.clip(before + rng.normal(0.05, 0.2, 200), 0, 1)
    found = stats.paired_difference(before.tolist(), after.tolist())
    assert found is not None
    assert found.interval is not None
    changes = after - before
    drawn = changes[rng.integers(0, 200, (4000, 200))].mean(axis=1)
    assert found.interval == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.004)


@pytest.mark.parametrize(("before", "after", "p"), [([0.1, 0.2], [0.1, 0.2], 1.0), ([0.0, 0.0], [1.0, 1.0], None)])
def test_differences_without_spread_have_no_interval(before, after, p):
    found = stats.paired_difference(before, after)
    assert found is not None
    assert (found.interval, found.p_value) == (None, p)
    assert stats.paired_difference([], []) is None
    assert stats.paired_difference([1.0], [2.0]) == stats.Difference(1.0, None, None, None, 1)


@given(st.integers(0, 9), st.integers(0, 9))
def test_the_sign_test_counts_the_outcomes_at_least_as_uneven(up, down):
    total = up + down
    gap = abs(up - down)
    outcomes = [abs(total - 2 * sum(flips)) >= gap for flips in product((0, 1), repeat=min(total, 12))]
    if total <= 12:
        assert stats.sign_test(up, down) == pytest.approx(sum(outcomes) / len(outcomes))


def test_the_format_reward_is_the_metric_named_so():
    assert stats.format_reward({"correct": 0.4, "format_reward": 0.9}) == ("format_reward", 0.9)
    assert stats.format_reward({"xml_format_reward_func": 0.2, "format": 0.9}) == ("format", 0.9)
    assert stats.format_reward({"correct": 0.4}) is None
