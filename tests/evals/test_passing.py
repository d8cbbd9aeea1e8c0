"""When a rollout has passed: by the correctness reward, whatever else is paid."""

from __future__ import annotations

import pytest
from tests.evals.conftest import row_of

from mettle.evals.facts import RolloutFacts, facts_of_row
from mettle.evals.passing import PassRule
from mettle.evals.report import stats_of
from mettle.evals.summary import Summary


def scored(reward, **metrics):
    return RolloutFacts(example_id=0, reward=reward, metrics=metrics)


def test_what_is_paid_for_the_form_does_not_make_an_answer_right():
    wrong_in_form = scored(0.5, correct=0.4, answer_format=1.0)
    assert PassRule(0.5).holds(wrong_in_form)
    rule = PassRule(0.5, {"correct": 1.0})
    assert (rule.correctness(wrong_in_form), rule.holds(wrong_in_form), rule.what) == (0.4, False, "correct")
    assert rule.holds(scored(1.1, correct=1.0, answer_format=1.0))


def test_a_rollout_that_lacks_a_metric_goes_by_its_reward_and_one_without_a_reward_has_not_passed():
    rule = PassRule(0.5, {"correct": 1.0, "fluent": 0.5})
    assert rule.holds(scored(0.6, correct=0.0))
    assert not rule.holds(scored(None, correct=1.0, fluent=1.0))


@pytest.mark.parametrize("pass_on", [None, [], {}, "correct", {"correct": "high"}, {"correct": True}])
def test_what_is_saved_and_cannot_be_read_is_as_if_it_were_not_there(pass_on):
    assert PassRule.of_metadata({"pass_threshold": 0.7, "pass_on": pass_on}) == PassRule(0.7)
    assert PassRule.of_metadata({"pass_threshold": "high"}) == PassRule(0.5)


def test_statistics_and_the_running_summary_count_by_the_same_rule():
    rows = [row_of(0, reward, metrics={"correct": correct}) for reward, correct in ((0.6, 0.0), (1.1, 1.0))]
    facts = [facts_of_row(row) for row in rows]
    stats = stats_of(facts, rollouts_per_example=2, pass_on={"correct": 1.0})
    assert (stats.pass_at_k["1"].mean, stats.pass_on) == (0.5, {"correct": 1.0})
    summary = Summary(2, 0.5, pass_on={"correct": 1.0})
    for each in facts:
        summary.add(each)
    told = summary.metadata()
    assert (told["pass_at_k"]["1"], told["pass_on"]) == (0.5, {"correct": 1.0})
    assert "pass_on" not in Summary(2, 0.5).metadata(), "a file of an ordinary environment is as verifiers writes it"
