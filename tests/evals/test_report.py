"""`results.stats`: what is in it, and what is None because nobody knows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evals.conftest import row_of

import mettle.envs as vf
from mettle.clients.prices import Price
from mettle.evals.facts import RolloutFacts, facts_of_row
from mettle.evals.report import plain, stats_of
from mettle.evals.summary import Summary
from mettle.evals.tally import Tally


def facts(*rewards, task=0, **fields):
    return [facts_of_row(row_of(task, reward, **fields)) for reward in rewards]


def test_the_figures_of_an_evaluation():
    rollouts = [*facts(1.0, 1.0), *facts(1.0, 0.0, task=1, is_truncated=True), *facts(0.0, None, task=2)]
    stats = stats_of(rollouts, rollouts_per_example=2, price=Price(1.0, 10.0))
    assert (stats.num_rollouts, stats.num_tasks, stats.num_scored) == (6, 3, 5)
    assert stats.reward.mean == 0.5, "the mean of the tasks' means"
    assert stats.avg_at_k == {"2": 0.5}
    assert stats.pass_at_k["1"].mean == pytest.approx(0.5)
    assert (stats.pass_at_k["2"].mean, stats.pass_at_k["2"].num_tasks) == (1.0, 2), (
        "one task has too few scored rollouts"
    )
    assert stats.pass_all_k["2"].mean == 0.5
    assert stats.metrics.right.mean == 0.5
    assert stats.errors.rate == pytest.approx(1 / 6)
    assert stats.errors.by_cause.provider == {
        "num": 1, "rate": pytest.approx(1 / 6), "types": {"ModelError": 1}, "first_message": "status 500",
    }  # fmt: skip
    assert stats.truncation_rate == pytest.approx(1 / 3)
    assert (stats.groups.num_groups, stats.groups.share_without_variance) == (2, 0.5)
    assert (stats.tokens.input, stats.tokens.output) == (50.0, 15.0)
    assert stats.cost.total_usd == pytest.approx((50 * 1.0 + 15 * 10.0) / 1e6)
    assert (stats.timing.total_s.p50, stats.timing.model_s.max, stats.timing.env_s) == (2.0, 1.5, None)
    assert stats.stop_conditions == {"max_turns_reached": 5}
    json.dumps(plain(stats), allow_nan=False)


def test_a_cost_that_is_not_known_is_no_figure():
    assert stats_of(facts(1.0), rollouts_per_example=1).cost is None
    uncounted = [*facts(1.0), *facts(1.0, token_usage=None)]
    assert stats_of(uncounted, rollouts_per_example=1, price=Price(1, 1)).cost is None
    failed_before_the_first_call = [*facts(1.0), *facts(None)]
    assert stats_of(failed_before_the_first_call, rollouts_per_example=1, price=Price(1, 1)).cost is not None


def test_with_nothing_scored_there_is_no_average():
    stats = stats_of(facts(None, None), rollouts_per_example=2)
    assert (stats.reward, stats.pass_at_k, stats.errors.rate, stats.tokens) == (None, {}, 1.0, None)
    assert stats_of([], rollouts_per_example=2).errors.rate is None


@given(st.lists(st.lists(st.none() | st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=2), min_size=1, max_size=8))
def test_the_running_summary_says_the_same_as_the_statistics_on_complete_tasks(rewards):
    rollouts = [one for task, values in enumerate(rewards) for one in facts(*values, task=task)]
    summary, tally = Summary(2, 0.5, Price(1, 2)), Tally("t", Price(1, 2))
    tally.start(len(rollouts), rollouts[:1])
    for number, one in enumerate(rollouts):
        summary.add(one)
        if number:
            tally.add(one)
    stats, metadata = stats_of(rollouts, rollouts_per_example=2, price=Price(1, 2)), summary.metadata()
    mean = stats.reward.mean if stats.reward else None
    assert metadata["avg_reward"] == tally.avg_reward == (mean if mean is None else pytest.approx(mean))
    assert metadata["avg_error"] == pytest.approx(stats.errors.rate)
    assert (tally.num_done, tally.num_errors) == (len(rollouts), stats.errors.num)
    cost = stats.cost.total_usd if stats.cost else None
    assert (metadata.get("cost") or {}).get("total_usd") == (cost if cost is None else pytest.approx(cost))
    complete = [values for values in rewards if None not in values]
    if complete:
        passed = sum(max(values) >= 0.5 for values in complete) / len(complete)
        assert metadata["pass_at_k"]["2"] == pytest.approx(passed) == stats.pass_at_k["2"].mean


async def test_results_have_statistics(scripted):
    def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    env = vf.SingleTurnEnv(eval_dataset=[{"question": "q", "answer": a} for a in "abc"], rubric=vf.Rubric([right]))
    results = await env.evaluate(scripted("a"), "m", rollouts_per_example=2, price=Price(1, 1))
    assert results.stats.reward.mean == pytest.approx(1 / 3)
    assert results.stats["pass_at_k"]["2"]["mean"] == pytest.approx(1 / 3)
    assert results.stats.cost.total_usd == results.metadata["cost"]["total_usd"] == pytest.approx(6 * 13 / 1e6)
    assert results.reward == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0], "columns still read as attributes"


def test_a_tally_tells_the_pace_and_the_time_left():
    now = [0.0]
    tally = Tally("t", Price(0, 1e6), clock=lambda: now[0])
    tally.start(12, facts(1.0, 1.0))
    assert (tally.tokens_per_s, tally.eta_s, tally.num_done) == (None, None, 2)
    for _ in range(5):
        now[0] += 1.0
        tally.add(RolloutFacts(1, 0.0, input_tokens=1.0, output_tokens=10.0))
    assert tally.tokens_per_s == pytest.approx(10.0)
    assert tally.eta_s == pytest.approx(5.0)
    assert tally.cost_usd == pytest.approx(56.0)
    now[0] += 100.0
    assert tally.tokens_per_s == 0.0, "nothing came lately"
