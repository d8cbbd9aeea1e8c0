"""Two evaluations of the same tasks: the difference, how sure it is, what flipped, and what else differs."""

from __future__ import annotations

import json

import pytest

from mettle.errors import UserError
from mettle.evals.compare import compare_evaluations
from mettle.evals.reader import EvaluationReader


def compare(before, after):
    return compare_evaluations(EvaluationReader(before), EvaluationReader(after))


def test_tasks_are_paired_and_flips_are_named(saved):
    before = saved([[0.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]], "a")
    after = saved([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]], "b")
    found = compare(before, after)
    assert found.difference.mean == pytest.approx((2 / 3 + 0 + 2 / 3 - 2 / 3) / 4)
    assert (found.num_risen, found.num_fallen, found.sign_p_value) == (2, 1, 1.0)
    assert [task.example_id for task in found.gained] == [0, 2]
    assert [task.example_id for task in found.lost] == [3]
    assert found.metrics["right"].difference.mean == pytest.approx(found.difference.mean)
    assert found.warnings == []
    json.dumps(found.to_dict())


def test_pairing_sees_a_small_gain_over_tasks_of_very_different_difficulty(saved):
    easy_to_hard = [i / 40 for i in range(40)]
    before = saved([[p] for p in easy_to_hard], "a")
    after = saved([[p + 0.02 + 0.01 * (i % 2)] for i, p in enumerate(easy_to_hard)], "b")
    difference = compare(before, after).difference
    assert difference.interval is not None
    assert difference.interval[0] > 0.02
    assert difference.p_value is not None
    assert difference.p_value < 1e-10


def test_only_tasks_that_both_scored_are_compared_and_that_is_said(saved):
    before = saved([[1.0], [None], [0.0]], "a")
    after = saved([[1.0], [1.0], [1.0], [1.0]], "b")
    found = compare(before, after)
    assert [task.example_id for task in found.tasks] == [0, 2]
    assert (found.num_only_before, found.num_only_after) == (0, 2)
    assert "A has 2 scored tasks, B 4; the 2 that both have are compared" in found.warnings
    assert "1 of 3 rollouts of A failed and count neither way" in found.warnings


def test_tasks_that_ask_something_else_are_left_out(saved):
    before, after = saved([[1.0], [0.0]], "a"), saved([[0.0], [0.0]], "b")
    file = after / "results.jsonl"
    file.write_text(file.read_text().replace("key0", "other"))
    found = compare(before, after)
    assert [task.example_id for task in found.tasks] == [1]
    assert "1 tasks ask something else in B under the same number; they are left out" in found.warnings


def test_files_without_task_keys_are_compared_by_number(saved):
    before, after = saved([[1.0], [0.0]], "a"), saved([[0.0], [0.0]], "b")
    file = after / "results.jsonl"
    file.write_text(file.read_text().replace('"task_key"', '"no_key"'))
    assert len(compare(before, after).tasks) == 2


def test_other_settings_are_pointed_out(saved):
    a = {
        "sampling_args": {"n": 1, "temperature": 0.0, "extra_body": {}},
        "env_args": {},
        "version_info": {"env_version": "1"},
    }
    b = {
        "sampling_args": {"temperature": 1.0},
        "env_id": "other",
        "env_args": {"level": 2},
        "version_info": {"env_version": "2"},
    }
    found = compare(saved([[1.0], [0.0]], "a", a), saved([[1.0], [0.0]], "b", b))
    assert found.warnings == [
        "env_id differs: 'toy' and 'other'",
        "env_args.level differs: None and 2",
        "sampling_args.temperature differs: 0.0 and 1.0",
        "the environment's version differs: '1' and '2'",
    ]


def test_nothing_in_common_is_one_line(saved):
    with pytest.raises(UserError, match="no scored task in common"):
        compare(saved([[None]], "a"), saved([[1.0]], "b"))
