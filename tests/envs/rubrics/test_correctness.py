"""Which part of a reward an evaluation holds against its pass threshold."""

from __future__ import annotations

import pytest

import mettle.envs as vf
from mettle.errors import UserError
from mettle.evals.passing import PassRule


def correct(completion, answer):
    return float(completion[-1]["content"] == answer)


def overlap(completion, answer):
    return 0.9


def answer_format(completion):
    return 1.0


def env_of(funcs, weights, **kwargs):
    rubric = vf.Rubric(funcs=funcs, weights=weights)
    return vf.SingleTurnEnv(dataset=[{"question": "q", "answer": "a"}], rubric=rubric, **kwargs)


@pytest.mark.parametrize(
    ("funcs", "weights", "pass_on", "rule"),
    [
        ([correct], [1.0], None, None),
        ([correct, overlap], [1.0, 1.0], None, None),
        ([correct, answer_format], [1.0, 0.0], None, None),
        ([answer_format], [1.0], None, None),
        ([correct, answer_format], [1.0, 0.1], None, {"correct": 1.0}),
        ([correct, answer_format], [0.2, 0.8], None, {"correct": 1.0}),
        ([correct, overlap, answer_format], [2.0, -1.0, 0.5], None, {"correct": 2.0, "overlap": -1.0}),
        ([correct, overlap, answer_format], [0.5, 0.5, 0.1], "correct", {"correct": 1.0}),
        ([correct, overlap], [3.0, 1.0], ["correct", "overlap"], {"correct": 0.75, "overlap": 0.25}),
        ([correct, overlap], [1.0, 0.0], "overlap", {"overlap": 1.0}),
    ],
)
def test_the_correctness_reward_is_the_reward_without_format_or_what_is_named(funcs, weights, pass_on, rule):
    assert env_of(funcs, weights, pass_on=pass_on).pass_on == rule


def test_a_metric_that_there_is_not_is_named():
    with pytest.raises(
        UserError, match="pass_on names 'right', which is no metric of this environment; there are correct"
    ):
        _ = env_of([correct], [1.0], pass_on="right").pass_on


def test_a_rubric_that_scores_groups_itself_goes_by_its_reward():
    class Ranked(vf.Rubric):
        async def score_group(self, states, **kwargs):
            for state in states:
                state["reward"], state["metrics"] = 1.0, {}

    rubric = Ranked(funcs=[correct, answer_format], weights=[1.0, 0.1])
    assert vf.SingleTurnEnv(dataset=[{"question": "q", "answer": "a"}], rubric=rubric).pass_on is None


def test_a_group_goes_by_the_rule_of_each_environment():
    paid_for_form = env_of([correct, answer_format], [1.0, 0.2])
    plain = env_of([overlap], [1.0])
    group = vf.EnvGroup([paid_for_form, plain], env_names=["one", "two"])
    rule = PassRule(0.5, group.pass_on)
    assert group.pass_on == {"correct": 1.0, "overlap": 1.0}
    assert rule.what == "correct + overlap"
    assert vf.EnvGroup([plain, env_of([overlap], [1.0])]).pass_on is None
    other = env_of([correct, answer_format], [5.0, 0.2])
    assert vf.EnvGroup([paid_for_form, other]).pass_on is None, "one name, two weights"


async def test_a_model_that_is_always_wrong_in_the_right_form_passes_nothing():
    class Wrong(vf.Client):
        async def get_response(self, *args, **kwargs):
            from mettle.records.messages import Response, ResponseMessage

            message = ResponseMessage(content="<answer>2021-03-05</answer>", finish_reason="stop", is_truncated=False)
            return Response(id="x", created=0, model="m", usage=None, message=message)

    def part(completion):
        return 0.45

    env = env_of([part, answer_format], [1.0, 0.1])
    results = await env.evaluate(client=Wrong(), model="m", num_examples=1, rollouts_per_example=2)
    assert results["metadata"]["avg_reward"] == pytest.approx(0.55)
    assert results["metadata"]["pass_at_k"]["1"] == 0.0
    assert results.stats.pass_at_k["1"].mean == 0.0
    assert results["metadata"]["pass_on"] == {"part": 1.0}
