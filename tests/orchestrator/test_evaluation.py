"""Which versions are evaluated, when the engine must hold still, and what is recorded."""

import pytest

from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.evaluation import EvalSchedule, eval_metrics, eval_versions
from mettle.storage.rollouts import RolloutRow


def config(max_steps=10, **options):
    values = {"envs": [{"id": "a"}, {"id": "b"}], "max_steps": max_steps, "eval": options}
    return OrchestratorConfig.model_validate(values)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(0, "baseline"), (10, "final")]),
        ({"interval": 4}, [(0, "baseline"), (4, "interim"), (8, "interim"), (10, "final")]),
        ({"interval": 5}, [(0, "baseline"), (5, "interim"), (10, "final")]),
        ({"at_start": False, "at_end": False}, []),
        ({"num_examples": 0}, []),
    ],
)
def test_versions_that_are_evaluated(options, expected):
    assert eval_versions(config(**options)) == expected


def test_a_run_without_steps_is_evaluated_once():
    assert eval_versions(config(max_steps=0)) == [(0, "baseline")]


def test_the_engine_holds_a_version_until_it_is_evaluated_and_passes_over_none_that_is_due():
    schedule = EvalSchedule(config(interval=4), [])
    assert schedule.target(-1, 2) == 0
    assert schedule.target(0, 6) == 0
    schedule.finish(0)
    assert schedule.target(0, 3) == 3
    assert schedule.target(3, 6) == 4
    assert schedule.target(4, 6) == 4
    schedule.finish(4)
    assert schedule.target(4, 6) == 6


def test_without_pin_nothing_is_held_but_no_version_is_passed_over():
    schedule = EvalSchedule(config(interval=4, pin=False), [])
    assert schedule.target(0, 6) == 4
    assert schedule.target(4, 6) == 6


def test_what_is_recorded_is_not_repeated():
    recorded = [("baseline", 0, "a"), ("baseline", 0, "b"), ("final", 10, "a")]
    schedule = EvalSchedule(config(), recorded)
    assert schedule.versions == [10]
    assert schedule.due(10) == ("final", ["b"])


def task(*rewards):
    return [
        RolloutRow(
            i, f"r{i}", i, 0, "u", reward, {"exact": reward or 0.0}, 1, 5, None, False,
            None if reward is not None else "judge", None, None, 0.0, None, None, None, None, None, "", "s", 0, 0,
        )
        for i, reward in enumerate(rewards)
    ]  # fmt: skip


def test_metrics_have_pass_at_k_where_rewards_are_right_or_wrong():
    found = eval_metrics([task(1.0, 0.0), task(0.0, 0.0), task(1.0, None)])
    assert found["pass@1"] == 0.25
    assert found["pass@2"] == 0.5
    assert found["error_rate"] == pytest.approx(1 / 6)
    assert "pass@1" not in eval_metrics([task(0.5, 0.0)])
