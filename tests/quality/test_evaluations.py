"""The distribution of an evaluation's rewards, and what is advised from it."""

from __future__ import annotations

import json
import os

import pytest

from mettle.errors import UserError
from mettle.quality.advice import advise, share_that_teaches
from mettle.quality.evaluations import distribution_checks, distribution_of, find_evaluation, read_distribution


def rows(groups, **more):
    return [
        {"example_id": task, "reward": reward, "metrics": {}, "is_truncated": False, "error": None, **more}
        for task, group in enumerate(groups)
        for reward in group
    ]


def failing(found):
    return {check.name for check in distribution_checks(found) if check.status not in ("pass", "skip")}


GOOD = rows([[0, 1, 1, 0]] * 6 + [[1, 1, 1, 1], [0, 0, 0, 0]])


def test_a_distribution_to_learn_from_passes():
    found = distribution_of(GOOD, {"env_id": "words", "model": "m"})
    assert failing(found) == set()
    assert (found.num_scored, found.num_groups, found.num_varying_groups) == (32, 8, 6)


@pytest.mark.parametrize(
    ("saved", "name"),
    [
        (rows([[0, 1]] * 5), "enough rollouts"),
        (rows([[0, 0.1]] + [[0, 0]] * 20), "mean above 0.05"),
        (rows([[1, 0.9]] + [[1, 1]] * 20), "mean below 0.95"),
        (rows([[0.5, 0.5]] * 20), "std above 0.05"),
        (rows([[0, 1]] * 20, metrics={"format_reward_func": 0.2}), "format above 0.3"),
        (GOOD + rows([[None] * 4], error={"error": "ModelError", "kind": "provider"}), "few errors"),
        (rows([[0, 1]] * 20, is_truncated=True), "few cut off"),
        (rows([[0, 0], [1, 1]] * 10), "variance within groups"),
        (rows([[0], [1]] * 10), "variance within groups"),
    ],
)
def test_each_way_to_be_unfit_has_its_check_and_its_remedy(saved, name):
    checks = {check.name: check for check in distribution_checks(distribution_of(saved))}
    assert checks[name].status != "pass"
    assert checks[name].fix


def test_errors_are_counted_by_cause_and_in_nothing_else():
    saved = GOOD + rows([[None] * 2], error={"error": "ModelError", "kind": "provider"}) + rows([[None]])
    found = distribution_of(saved)
    assert (found.num_errors, found.error_kinds) == (3, {"provider": 2, "no reward": 1})
    assert found.mean == distribution_of(GOOD).mean


def test_an_evaluation_in_which_everything_failed_is_untested_and_said_so():
    found = distribution_of(rows([[None] * 30], error="boom: x"))
    statuses = {check.name: check.status for check in distribution_checks(found)}
    assert statuses["few errors"] == "fail"
    assert statuses["mean above 0.05"] == "untested"
    assert [advice.topic for advice in advise(found)] == ["baseline"]


@pytest.mark.parametrize(
    ("groups", "topic", "words"),
    [
        ([[0] * 4] * 5, "difficulty", "too hard for this model"),
        ([[0, 0]] * 2, "difficulty", "try 10 or more"),
        ([[1, 1, 1, 0]] * 10, "difficulty", "fit to train"),
        ([[1, 1, 1, 1, 0]] * 10, "difficulty", "too easy"),
        ([[0] * 4, [1] * 4] * 5, "group size", "nothing can be learned"),
        ([[0, 1, 1, 0]] * 10, "group size", "orchestrator.group_size = 4"),
        ([[0] * 8] * 4 + [[0, 1] * 4] * 6, "hard tasks", "hard_weight"),
        ([[1] * 8] * 4 + [[0, 1] * 4] * 6, "easy tasks", "easy_weight"),
        ([[1] * 8] + [[0, 1] * 4] * 6, "filter", "filter_zero_advantages"),
        ([[1]] * 10, "group size", "-r 4"),
    ],
)
def test_the_adviser_follows_the_rules_of_thumb(groups, topic, words):
    found = {advice.topic: advice.action for advice in advise(distribution_of(rows(groups)))}
    assert words in found[topic]


def test_rarely_passed_tasks_need_larger_groups():
    groups = [[1] + [0] * 15] * 10
    found = {advice.topic: advice.action for advice in advise(distribution_of(rows(groups)))}
    assert found["group size"] == "orchestrator.group_size = 8"
    assert share_that_teaches((0.5,), (1000,), 2) == pytest.approx(0.5, abs=1e-3)


def save(folder, saved, **metadata):
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in saved) + '{"cut')
    (folder / "metadata.json").write_text(json.dumps({"env_id": "two-words", "model": "m", **metadata}))
    return folder


def test_the_newest_evaluation_of_an_environment_is_found(tmp_path):
    old = save(tmp_path / "outputs" / "evals" / "two-words--m" / "aaaa", GOOD)
    new = save(tmp_path / "environments" / "two_words" / "outputs" / "evals" / "two-words--m" / "bbbb", GOOD[:4])
    save(tmp_path / "outputs" / "evals" / "two-words-more--m" / "cccc", GOOD)
    os.utime(old / "metadata.json", (1, 1))
    os.utime(new / "metadata.json", (2, 2))
    assert find_evaluation("two-words", tmp_path) == new
    assert find_evaluation("two_words", tmp_path) == new
    assert find_evaluation(str(old / "results.jsonl")) == old
    assert read_distribution(new).num_rollouts == 4
    with pytest.raises(UserError, match="'three' is no saved evaluation"):
        find_evaluation("three", tmp_path)
