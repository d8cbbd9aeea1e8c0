"""Mathematical rewards: what is equal, what is not, and what is no verdict at all."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mettle.envs as vf
from mettle.errors import JudgeError, UserError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs mettle-lab[math]")


@pytest.fixture(scope="module")
def rubric() -> vf.MathRubric:
    return vf.MathRubric(timeout_seconds=5)


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        ("42", r"\boxed{42}", 1.0),
        ("42", r"so \boxed{41}, no, \boxed{42}", 1.0),
        ("42", r"<think>\boxed{42}</think> I do not know", 0.0),
        ("42", "42", 0.0),
        ("42", None, 0.0),
        ("-7", r"\boxed{+7}", 0.0),
        ("007", r"\boxed{7}", 1.0),
        ("1/2", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}", 1.0),
        ("1,234", r"\boxed{1234}", 1.0),
        ("(x+1)^2", r"\boxed{x^2+2x+1}", 1.0),
        ("(x+1)^2", r"\boxed{x^2+1}", 0.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        ("x", r"\boxed{" + "x" * 60_000 + "}", 0.0),
    ],
)
async def test_equal_means_mathematically_equal(rubric, finished, answer, said, reward):
    state = finished(answer, said)
    await rubric.score_rollout(state)
    assert (state["error"], state["reward"]) == (None, reward)


@pytest.mark.parametrize(
    ("answer", "said", "says"),
    [("", r"\boxed{1}", "no answer to compare with"), ("2", r"\boxed{9^{9^{9^{9}}}}", "no verdict on '9^{9^{9^{9}}}'")],
)
async def test_what_cannot_be_known_is_an_error_and_not_a_zero(finished, answer, said, says):
    state, sibling = finished(answer, said), finished("1/2", r"\boxed{0.5}")
    await vf.MathRubric(timeout_seconds=0.5).score_group([state, sibling])
    assert isinstance(state["error"], JudgeError)
    assert str(state["error"]).startswith("correct_answer: ")
    assert says in str(state["error"])
    assert (state["reward"], sibling["reward"], sibling["advantage"]) == (None, 1.0, 0.0)


async def test_the_loop_turns_while_hundreds_are_verified(rubric, finished):
    states = [finished(f"x+{i}", rf"\boxed{{{i}+x}}") for i in range(300)]
    await rubric.score_rollout(finished("x", r"\boxed{x+0}"))
    task, num_turns = asyncio.ensure_future(rubric.score_group(states)), 0
    while not task.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert [state["reward"] for state in states] == [1.0] * 300
    assert num_turns > 50


async def test_own_functions_and_a_parser_are_taken_along(finished):
    def length(completion):
        return float(len(completion[-1]["content"]))

    rubric = vf.MathRubric([length], [0.5], parser=vf.XMLParser(["answer"]))
    state = finished("3", "<answer>3</answer>")
    await rubric.score_rollout(state)
    assert state["metrics"] == {"length": 18.0, "correct_answer": 1.0}
    assert state["reward"] == 10.0


async def test_without_the_package_one_line_names_the_extra(finished, monkeypatch):
    monkeypatch.setattr("mettle.envs.rubrics.math_rubric.importlib.util.find_spec", lambda name: None)
    state = finished("1/2", r"\boxed{0.5}")
    await vf.MathRubric().score_rollout(state)
    assert "pip install 'mettle-lab[math]'" in str(state["error"])
    assert isinstance(state["error"].__cause__, UserError)


signed = st.builds(
    lambda sign, digits: sign + digits, st.sampled_from(["", "-", "+"]), st.from_regex(r"[0-9]{1,6}", fullmatch=True)
)


@given(signed, signed)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_short_cut_for_integers_agrees_with_the_long_way(left, right):
    from mettle.envs.rubrics.math_verification import verify

    assert asyncio.run(vf.MathRubric().verify(left, right)) == verify(left, right)
    assert asyncio.run(vf.MathRubric().verify(left, left))
