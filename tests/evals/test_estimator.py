"""The statistics of evaluations against NumPy twins, tables, brute force and simulation."""

from __future__ import annotations

import math
import re
import time
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.evals import estimator as stats

values = st.floats(-100, 100)
clusters = st.lists(st.lists(values, max_size=5), min_size=1, max_size=8)


@given(st.lists(values, min_size=1, max_size=30))
def test_a_spread_is_that_of_numpy(numbers):
    seen = stats.spread(numbers)
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
def test_the_mean_and_its_error_are_those_of_the_task_means(groups):
    estimate = stats.mean_over_tasks(groups)
    means = [np.mean(group) for group in groups if group]
    if not means:
        assert estimate is None
        return
    assert estimate is not None
    assert estimate.mean == pytest.approx(np.mean(means), abs=1e-9)
    assert (estimate.num_tasks, estimate.num_values) == (len(means), sum(map(len, groups)))
    if len(means) < 2:
        assert (estimate.standard_error, estimate.interval) == (None, None)
    else:
        assert estimate.standard_error == pytest.approx(np.std(means, ddof=1) / math.sqrt(len(means)), abs=1e-7)


def test_each_task_counts_once_however_many_of_its_rollouts_were_scored():
    estimate = stats.mean_over_tasks([[1.0, 1.0, 1.0], [0.0]])
    assert estimate is not None
    assert estimate.mean == 0.5
    assert estimate.interval == (pytest.approx(0.0126, abs=1e-3), pytest.approx(0.9874, abs=1e-3))


@given(st.lists(st.lists(values, min_size=1, max_size=4), min_size=2, max_size=8), st.sampled_from(["", "num_turns"]))
def test_an_interval_lies_in_the_range_holds_the_mean_and_has_a_width(groups, name):
    flat = [value for group in groups for value in group]
    low, high = stats.known_range(flat, name)
    assert low <= min(flat) <= max(flat) <= high
    estimate = stats.mean_over_tasks(groups, (low, high))
    assert estimate is not None
    assert estimate.interval is not None
    assert low <= estimate.interval[0] < estimate.interval[1] <= high
    assert estimate.interval[0] <= estimate.mean + 1e-9 * (1 + abs(estimate.mean))
    assert estimate.mean - 1e-9 * (1 + abs(estimate.mean)) <= estimate.interval[1]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=60))
def test_shares_have_the_bounds_of_clopper_and_pearson(rewards):
    estimate = stats.mean_over_tasks([[reward] for reward in rewards])
    assert estimate is not None
    assert estimate.interval is not None
    low, high = estimate.interval
    num, right = len(rewards), int(sum(rewards))
    # The lower bound is the share with which `right` or more of `num` happen in 2.5 % of cases.
    for bound, correct in ((low, right), (1 - high, num - right)):
        tail = sum(math.comb(num, k) * bound**k * (1 - bound) ** (num - k) for k in range(correct, num + 1))
        assert bound == 0.0 if correct == 0 else tail == pytest.approx(0.025, rel=0.045)


@pytest.mark.parametrize("num", [2, 5, 30])
def test_the_bounds_are_the_quantiles_of_the_draws_that_define_them(num):
    rng = np.random.default_rng(num)
    rewards = rng.beta(0.4, 0.8, num)
    weights = rng.dirichlet(np.ones(num + 1), 200_000)
    estimate = stats.mean_over_tasks([[reward] for reward in rewards])
    assert estimate is not None
    assert estimate.interval == (
        pytest.approx(np.quantile(weights @ np.append(rewards, 0.0), 0.025), abs=4e-3),
        pytest.approx(np.quantile(weights @ np.append(rewards, 1.0), 0.975), abs=4e-3),
    )


@pytest.mark.parametrize(
    ("found", "name", "expected"),
    [
        ([0.0, 1.0], "", stats.SHARE),
        ([0.2, 1.2], "", stats.COUNT),
        ([-1.0, 0.5], "", stats.SIGNED),
        ([-3.0, 0.5], "", stats.ANYTHING),
        ([1.0, 1.0], "num_turns", stats.COUNT),
        ([0.0, 1.0 + 1e-12], "", stats.SHARE),
    ],
)
def test_a_range_that_nobody_declared_is_the_narrowest_usual_one(found, name, expected):
    assert stats.known_range(found, name) == expected


def test_a_value_outside_the_declared_range_is_an_error():
    with pytest.raises(ValueError, match="0 to 2 are said to lie within 0 and 1"):
        stats.mean_over_tasks([[0.0], [2.0]], stats.SHARE)


def test_counts_have_no_negative_bound():
    estimate = stats.mean_over_tasks([[1.0], [1.0], [1.0], [2.0]])
    assert estimate is not None
    assert estimate.interval == (pytest.approx(0.47, abs=0.01), pytest.approx(3.33, abs=0.01))
    never = stats.mean_over_tasks([[0.0]] * 6, stats.COUNT)
    assert never is not None
    assert never.interval == (0.0, pytest.approx(-math.log(0.025) / 6)), "of a Poisson count that was 0 six times"


def test_many_values_cost_little_and_lose_nothing():
    rng = np.random.default_rng(1)
    rewards = rng.random(16_000)
    started = time.process_time()
    estimate = stats.mean_over_tasks([[reward] for reward in rewards.tolist()])
    assert time.process_time() - started < 1.0, "about 0.05 s"
    assert estimate is not None
    half = 1.96 * rewards.std(ddof=1) / math.sqrt(len(rewards))
    assert estimate.interval == pytest.approx((rewards.mean() - half, rewards.mean() + half), abs=1e-4)


@given(st.lists(st.tuples(st.integers(0, 3), values), min_size=1, max_size=30))
def test_a_running_mean_is_the_mean_over_tasks_in_any_order(added):
    running = stats.RunningMean()
    assert running.mean is None
    for task, value in added:
        running.add(task, value)
    groups = [[value for task, value in added if task == number] for number in range(4)]
    assert running.mean == pytest.approx(stats.mean_over_tasks(groups).mean, abs=1e-9)


def test_repeating_each_rollout_adds_no_confidence():
    once = stats.mean_over_tasks([[0.2], [0.9], [0.4], [0.7]])
    often = stats.mean_over_tasks([[0.2] * 50, [0.9] * 50, [0.4] * 50, [0.7] * 50])
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
        estimate = stats.mean_over_tasks(rollouts.astype(float).tolist())
        assert estimate is not None
        assert estimate.interval is not None
        held += estimate.interval[0] <= 0.5 <= estimate.interval[1]
        half = 1.96 * rollouts.std() / math.sqrt(rollouts.size)
        naive += abs(rollouts.mean() - 0.5) <= half
    assert 0.92 <= held / 400 <= 0.98
    assert naive / 400 < 0.75


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
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert low - 0.01 < found.interval[0] < low, "a little wider, since no task can be known to stay near the others"
    assert high < found.interval[1] < high + 0.01


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=20))
def test_a_difference_of_shares_stays_in_its_range_and_its_p_value_agrees_with_the_interval(pairs):
    found = stats.paired_difference([a for a, _ in pairs], [b for _, b in pairs], stats.SHARE)
    assert found is not None
    assert found.interval is not None
    low, high = found.interval
    assert -1.0 <= low < high <= 1.0
    assert low - 1e-9 <= found.mean <= high + 1e-9
    if abs(found.p_value - 0.05) > 1e-3:
        assert (found.p_value < 0.05) == (low > 0 or high < 0)


def test_equal_changes_have_a_width_and_one_pair_has_none():
    for before, after in (([0.1] * 4, [0.1] * 4), ([0.0, 0.0], [1.0, 1.0]), ([3.0] * 5, [7.0] * 5)):
        found = stats.paired_difference(before, after)
        assert found is not None
        assert found.interval is not None
        assert found.interval[0] < found.interval[1]
        assert found.p_value == 1.0 or before != after
    ten = stats.paired_difference([0.0] * 10, [1.0] * 10)
    assert ten is not None
    assert ten.p_value == pytest.approx(2 / 2**10, rel=0.05), "all of ten the same way"
    assert stats.paired_difference([], []) is None
    assert stats.paired_difference([1.0], [2.0]) == stats.Difference(1.0, None, None, None, 1)


@given(st.integers(0, 9), st.integers(0, 9))
def test_the_sign_test_counts_the_outcomes_at_least_as_uneven(up, down):
    total = up + down
    gap = abs(up - down)
    outcomes = [abs(total - 2 * sum(flips)) >= gap for flips in product((0, 1), repeat=min(total, 12))]
    if total <= 12:
        assert stats.sign_test(up, down) == pytest.approx(sum(outcomes) / len(outcomes))


ESTIMATOR = Path(stats.__file__)
SOURCES = [path for path in ESTIMATOR.parents[1].rglob("*.py") if path != ESTIMATOR]
BELOW = ("storage/ledger.py", "sandbox/")
"""Rooms below the estimator: the spread of one group as it is recorded, and the latencies of a self-test."""
NAMES = re.compile(
    r"(?:class|def) _?(?:Estimate|clustered_\w+|mean_over_tasks|pass_(?:at|all)_k|quantiles?|percentiles?|student_t\w*|t_975"
    r"|paired_difference|sign_test|wilson\w*|share_interval|confidence_interval|bootstrap\w*)\b"
    r"|^\s*(?:import statistics|from statistics import)\b|\bnp\.(?:percentile|quantile|nanpercentile|std|var)\b"
    r"|\bmath\.comb\([^)]*(?:num_correct|num_right|num_wrong|num_samples)|\b12\.706|\b1\.95996|\b1\.96\b"
    r"|\bsum\((?:known|rewards|values|group\.rewards)\) / len\(",
    re.MULTILINE,
)


def test_there_is_no_second_estimator():
    found = {
        f"{path.relative_to(ESTIMATOR.parents[1])}: {match[0].strip()}"
        for path in SOURCES
        if not path.relative_to(ESTIMATOR.parents[1]).as_posix().startswith(BELOW)
        for match in NAMES.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set(), "means, intervals, quantiles and pass@k are made in mettle.evals.estimator alone"


def test_the_words_that_forbid_a_second_estimator_find_one():
    for text in ("def pass_at_k(n, c, k):", "class Estimate:", "    import statistics", "low = np.percentile(x, 10)"):
        assert NAMES.search(text), text
