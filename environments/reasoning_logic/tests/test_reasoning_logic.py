"""Families, levels and the curriculum; and that each family's own answer is right at each level."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

import mettle.envs as vf
from mettle.errors import UserError

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed")


@pytest.fixture(scope="module")
def module():
    vf.load_environment("reasoning-logic")
    return sys.modules["reasoning_logic"]


def levels(rows):
    return [row["info"]["source_dataset"].partition(":")[2] for row in rows]


def test_there_are_thirty_one_families_and_all_are_used(module):
    families = module.chosen_families("all")
    assert len(families) == len(set(families)) == 31
    env = vf.load_environment("reasoning-logic", num_train=400)
    assert {row["info"]["source_dataset"].partition(":")[0] for row in env.get_dataset()} == set(families)


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
async def test_every_familys_own_answer_scores_one_at_every_level(module, difficulty):
    for family in module.chosen_families("all"):
        env = vf.load_environment("reasoning-logic", families=family, difficulty=difficulty, num_train=2, num_eval=0)
        for row in env.get_dataset():
            state = await env.run_rollout(row, vf.Demonstrator(env), "gold")
            assert (state["reward"], state["error"]) == (1.0, None), family


def test_no_evaluation_question_is_trained_on_with_whatever_seed():
    def questions(rows):
        return {" ".join(row["prompt"][-1]["content"].casefold().split()) for row in rows}

    trained, held_out = set(), set()
    for seed in range(2):
        env = vf.load_environment("reasoning-logic", num_train=300, num_eval=100, seed=seed)
        trained |= questions(env.get_dataset())
        held_out |= questions(env.get_eval_dataset())
    assert len(held_out) > 150
    assert trained & held_out == set()


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
def test_the_families_with_the_fewest_questions_have_some_on_both_sides(module, difficulty):
    for family in ("tower_of_hanoi", "n_queens", "leg_counting", "count_primes", "maze", "kakurasu"):
        env = vf.load_environment("reasoning-logic", families=family, difficulty=difficulty, num_train=1, num_eval=1)
        sides = [module.is_held_out(env.rg_dataset[index]["question"]) for index in (0, 1)]
        assert sides == [False, True], family


def test_a_family_that_cannot_be_parted_is_refused_in_one_line(module, monkeypatch):
    monkeypatch.setattr(module, "is_held_out", lambda question: False)
    with pytest.raises(UserError, match="ab:easy has too few different tasks"):
        vf.load_environment("reasoning-logic", families="ab", num_train=1, num_eval=1).get_eval_dataset()


def test_a_curriculum_rises_over_the_training_rows(module):
    env = vf.load_environment(
        "reasoning-logic", families="graphs", difficulty="hard", curriculum=True, num_train=30, num_eval=5
    )
    assert levels(env.get_dataset()) == ["easy"] * 10 + ["medium"] * 10 + ["hard"] * 10
    assert levels(env.get_eval_dataset()) == ["hard"] * 5
    flat = vf.load_environment("reasoning-logic", families="graphs", difficulty="medium", num_train=9, num_eval=3)
    assert set(levels(flat.get_dataset()) + levels(flat.get_eval_dataset())) == {"medium"}


def test_groups_and_families_mix_and_rows_repeat_by_seed(module):
    assert module.chosen_families(["graphs", "ab", "ab"]) == [*module.GROUPS["graphs"], "ab"]
    first = vf.load_environment("reasoning-logic", num_train=20).get_dataset().to_list()
    assert vf.load_environment("reasoning-logic", num_train=20).get_dataset().to_list() == first
    assert vf.load_environment("reasoning-logic", num_train=20, seed=1).get_dataset().to_list() != first


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"families": "sudokus"}, "no group or family 'sudokus'; groups are all, deduction"),
        ({"families": []}, "families is empty"),
        ({"difficulty": "brutal"}, "difficulty is one of easy, medium, hard, not 'brutal'"),
    ],
)
def test_wrong_arguments_are_refused(wrong, says):
    with pytest.raises(Exception, match=says):
        vf.load_environment("reasoning-logic", **wrong)
