"""How rows are split, whatever the datasets are, and how a prompt is put into a row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mettle.envs as vf
from mettle.errors import UserError
from mettle.evals.output import task_key_of
from mettle.gepa.rows import prompt_of_rows, split_rows, with_prompt


def _env(train: list[str] | None, held: list[str] | None, **kwargs: object) -> vf.SingleTurnEnv:
    def rows(questions: list[str] | None) -> list[dict[str, str]] | None:
        return None if questions is None else [{"question": q, "answer": "a"} for q in questions]

    return vf.SingleTurnEnv(dataset=rows(train), eval_dataset=rows(held), rubric=vf.Rubric(), **kwargs)


questions = st.lists(st.integers(0, 40).map(str), min_size=1, max_size=40)
sizes = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 20))


@given(st.none() | questions, questions, sizes, st.integers(0, 3))
def test_no_task_is_on_two_sides_and_none_is_asked_for_twice(train, held, wanted, seed):
    env = _env(train, held)
    try:
        split = split_rows(env, *wanted, seed)
    except UserError:
        distinct = len(set(held) | set(train or ()))
        assert distinct < 3 or not set(train or held) - set(held)
        return
    sides = (split.train, split.val, split.test)
    keys = [task_key_of(row) for side in sides for row in side]
    assert len(keys) == len(set(keys))
    assert all(len(side) <= num for side, num in zip(sides, wanted, strict=True))
    assert split.train
    assert split.val
    assert bool(split.test) == bool(wanted[2])
    assert split_rows(env, *wanted, seed) == split


def test_a_small_evaluation_dataset_gets_training_rows_that_nobody_learns_from():
    split = split_rows(_env([f"t{i}" for i in range(100)], ["e1"]), 20, 10, 10, 0)
    assert [len(side) for side in (split.train, split.val, split.test)] == [20, 10, 10]


def test_the_prompt_of_the_rows_is_replaced_added_or_left_out():
    [row] = _env(["q"], None, system_prompt="old").get_dataset().to_list()
    assert prompt_of_rows([row]) == "old"
    assert [m["content"] for m in with_prompt(row, "new")["prompt"]] == ["new", "q"]
    assert [m["content"] for m in with_prompt(row, "  ")["prompt"]] == ["q"]
    assert row["prompt"][0]["content"] == "old", "the row itself is as it was"
    [bare] = _env(["q"], None).get_dataset().to_list()
    assert prompt_of_rows([bare]) == ""
    assert [m["role"] for m in with_prompt(bare, "new")["prompt"]] == ["system", "user"]


def test_rows_with_several_system_prompts_are_refused():
    rows = [{"prompt": [{"role": "system", "content": str(i)}, {"role": "user", "content": "q"}]} for i in range(3)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric())
    with pytest.raises(UserError, match="the rows have 3 different system prompts"):
        prompt_of_rows(env.get_dataset().to_list())
