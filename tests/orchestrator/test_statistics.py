"""Intervals that take tasks, not rollouts, as the unit."""

import random

import pytest

from mettle.orchestrator.statistics import clustered_mean, pass_at_k, t_975


def test_a_mean_over_tasks_weighs_each_task_once():
    assert clustered_mean([[1.0, 1.0, 1.0], [0.0]]).mean == 0.5


def test_one_task_has_no_interval_and_none_has_no_mean():
    assert clustered_mean([[1.0, 0.0]]).interval is None
    assert clustered_mean([[], []]).mean is None


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.7062), (10, 2.2281), (11, 2.2010), (30, 2.0423), (120, 1.9799)])
def test_the_quantiles_are_those_of_the_table(degrees, value):
    assert t_975(degrees) == pytest.approx(value, abs=2e-4)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    rng = random.Random(0)
    hits = 0
    for _ in range(1000):
        tasks = []
        for _ in range(12):
            ability = rng.gauss(0.5, 0.2)
            tasks.append([ability + rng.gauss(0.0, 0.1) for _ in range(4)])
        low, high = clustered_mean(tasks).interval
        hits += low <= 0.5 <= high
    assert 930 <= hits <= 970


def test_pass_at_k_is_the_unbiased_estimator():
    assert pass_at_k(4, 2, 1) == 0.5
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 1, 4) == 1.0
