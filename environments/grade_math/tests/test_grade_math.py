"""The problems, and which answers mean the same."""

from __future__ import annotations

import random
import re
import sys

import pytest

from mettle.envs import Demonstrator, load_environment

pytest.importorskip("math_verify")


@pytest.fixture
async def env():
    made = load_environment("grade-math")
    yield made
    await made.teardown()


async def reward(env, row, text):
    env.demonstrate = lambda messages, row: text
    state = await env.run_rollout(row, Demonstrator(env), "m")
    assert state["error"] is None
    return state["reward"]


def row_with(answer):
    return {"prompt": [{"role": "user", "content": "?"}], "answer": answer, "example_id": 0}


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("12", r"\boxed{12}", 1),
        ("12", r"\boxed{12.0}", 1),
        ("12", r"<think>\boxed{13}</think> so \boxed{12}", 1),
        ("12", "12", 0),
        ("12", r"\boxed{}", 0),
        ("12", r"\boxed{12, 13, 14}", 0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        (r"\frac{1}{2}", r"\boxed{1/2}", 1),
        (r"\frac{1}{2}", r"\boxed{\frac{2}{3}}", 0),
        (r"3\sqrt{2}", r"\boxed{\sqrt{18}}", 1),
        ("x^2-1", r"\boxed{(x-1)(x+1)}", 1),
        (r"9\pi", r"\boxed{\pi \cdot 9}", 1),
        (r"9\pi", r"\boxed{28.27}", 0),
    ],
)
async def test_answers_count_by_what_they_mean(env, answer, text, expected):
    assert await reward(env, row_with(answer), text) == expected


async def test_every_family_is_solved_by_its_own_steps(env):
    seen = {}
    for row in [*env.get_dataset(), *env.get_eval_dataset()]:
        seen.setdefault(row["info"]["family"], []).append(row)
    assert len(seen) == 18
    for rows in seen.values():
        for row in rows[:4]:
            state = await env.run_rollout(row, Demonstrator(env), "gold")
            assert state["reward"] == 1.0, row


def test_the_steps_of_a_story_are_right(env):
    module = sys.modules["math_stories"]
    rng = random.Random(3)
    for _ in range(400):
        problem = module.story(rng)
        for step in problem.steps:
            left, right = step.split(" = ")
            assert re.fullmatch(r"[-+*/() 0-9]+", left)
            assert eval(left) == int(right)  # sums that this package wrote, and nothing else
        assert problem.answer == problem.steps[-1].split(" = ")[1]


def test_splits_share_no_problem(env):
    train, evaluation = env.get_dataset()["question"], env.get_eval_dataset()["question"]
    assert len(set(train)) == 1000
    assert not set(train) & set(evaluation)


@pytest.mark.parametrize("wrong", [{"source": "web"}, {"kinds": ["poems"]}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(RuntimeError, match="not"):
        load_environment("grade-math", **wrong)
