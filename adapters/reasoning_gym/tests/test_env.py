"""Tasks of reasoning-gym: which there are, what an answer scores, and that none is executed."""

from __future__ import annotations

import random
import sys
from importlib.util import find_spec

import pytest

import mettle.envs as vf
from mettle.errors import UserError
from mettle_reasoning_gym.safe_answers import EVALUATING, PARSING, is_plain_formula

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed")


def env_of(gym="leg_counting", **options):
    return vf.ReasoningGymEnv(gym, **{"num_train_examples": 6, "num_eval_examples": 3, **options})


async def score(env, scripted, said, row=0):
    state = await env.run_rollout(env.get_dataset()[row], scripted(said), "m")
    assert state["error"] is None, state["error"]
    return state["reward"]


def test_constructing_one_imports_and_generates_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    env = env_of(num_train_examples=10**6)
    with pytest.raises(
        UserError,
        match=r"ReasoningGymEnv needs reasoning_gym, which is not installed: pip install .*adapters/reasoning_gym brings it",
    ):
        env.get_dataset()


def test_rows_carry_index_and_family_and_splits_are_apart():
    env = env_of()
    train, held_out = env.get_dataset(), env.get_eval_dataset()
    assert train["answer"] + held_out["answer"] == [str(i) for i in range(9)]
    assert set(train[0]["info"].items()) == {("source_dataset", "leg_counting")}
    assert train[0]["prompt"][0]["role"] == "system"
    assert "<answer>" in train[0]["prompt"][0]["content"]
    assert not set(train["question"]) & set(held_out["question"])
    assert env_of(system_prompt=None).get_dataset()[0]["prompt"][0]["role"] == "user"


def test_the_same_seed_makes_the_same_tasks_in_any_order():
    gym = ["leg_counting", {"name": "number_sorting", "weight": 2.0, "config": {"max_numbers": 4}}, "sudoku"]
    first, second = env_of(gym, seed=3), env_of(gym, seed=3)
    questions = first.get_dataset()["question"]
    random.seed(5)
    assert [second.get_dataset()[i]["question"] for i in reversed(range(6))][::-1] == questions
    assert env_of(gym, seed=4).get_dataset()["question"] != questions


async def test_the_oracle_scores_one_and_no_answer_the_familys_least(scripted):
    env = env_of()
    answer = env.rg_dataset[2]["answer"]
    assert await score(env, scripted, f"<answer>{answer}</answer>", 2) == 1.0
    assert await score(env, scripted, "I do not know", 2) == 0.0
    assert await score(env, scripted, "<answer>-1</answer>", 2) == 0.0


async def test_a_mix_is_scored_by_the_verifier_of_each_family(scripted):
    env = env_of(["spell_backward", "base_conversion"], num_train_examples=12)
    rows = env.get_dataset()
    assert {row["info"]["source_dataset"] for row in rows} == {"spell_backward", "base_conversion"}
    for index in range(12):
        oracle = env.rg_dataset[index]["answer"]
        assert await score(env, scripted, f"<answer>{oracle}</answer>", index) == 1.0


@pytest.mark.parametrize("family", ["prime_factorization", "game_of_life", "coin_flip"])
@pytest.mark.parametrize("answer", ["abc", "{}", "1e400", "\x00", "[[1,2],[3]]"])
async def test_an_answer_that_the_verifier_cannot_read_scores_as_none_given(scripted, family, answer):
    env = env_of(family, num_train_examples=1, num_eval_examples=0)
    assert await score(env, scripted, f"<answer>{answer}</answer>") < 0.5


@pytest.mark.parametrize("family", sorted(EVALUATING | PARSING))
async def test_no_verifier_executes_an_answer(scripted, family, tmp_path):
    env = env_of(family, num_train_examples=1, num_eval_examples=0)
    trace = tmp_path / "executed"
    for code in (f"__import__('pathlib').Path({str(trace)!r}).touch()", f"[open({str(trace)!r}, 'w')]"):
        assert await score(env, scripted, f"<answer>{code}</answer>") < 0.1
    assert await score(env, scripted, "<answer>9**9**9**9</answer>") < 0.1
    assert not trace.exists()
    oracle = env.rg_dataset[0]["answer"]
    assert await score(env, scripted, f"<answer>{oracle}</answer>") == 1.0


@pytest.mark.parametrize(
    "formula",
    ["24", "(3 + 5) * 4 - 8/2", "x**2/2 + 3*x + C", "-sin(2*x)*exp(x)", "sqrt(x)*log(x)", "2**10", "E**(2*x)"],
)
def test_school_mathematics_is_a_plain_formula(formula):
    assert is_plain_formula(formula)


@pytest.mark.parametrize(
    "formula",
    [
        "",
        "f(x)",
        "x.y",
        "x[0]",
        "'a'",
        "lambda: 1",
        "9**9**9",
        "((9**999)**999)",
        "(x+1)**1000",
        "a and b",
        "1;2",
        "exp",
        "pi.evalf()",
        "+".join("x" * 400),
        "(" * 300 + "1" + ")" * 300,
        "1e999",
        "True",
        "sin(x=1)",
        "9" * 5000,
    ],
)
def test_anything_else_is_not(formula):
    assert not is_plain_formula(formula)


@pytest.mark.parametrize(
    ("gym", "says"),
    [
        ("leg_countin", "no family 'leg_countin'; nearest are leg_counting"),
        (["leg_counting", "zzz"], "no family 'zzz'"),
        ([], "name of a family or a list"),
        ([{"weight": 2}], "name or {name, weight, config}"),
        ([{"name": "sudoku", "wieght": 2}], "name or {name, weight, config}"),
        (7, "name of a family or a list"),
        ([{"name": "sudoku", "config": {"no_such": 1}}], "refused the settings of sudoku.*no_such"),
        ([{"name": "sudoku", "weight": -1}], "refused the settings"),
    ],
)
def test_what_cannot_be_had_is_said(gym, says):
    with pytest.raises(UserError, match=says):
        env_of(gym).get_dataset()


async def test_one_family_takes_a_config_and_other_options_pass(scripted):
    env = env_of("leg_counting", config={"max_animals": 3, "min_animals": 3}, env_id="legs", pass_threshold=0.9)
    assert (env.env_id, env.pass_threshold) == ("legs", 0.9)
    assert env.rg_dataset.config.max_animals == 3
    with pytest.raises(UserError, match="config is for one family"):
        env_of(["leg_counting"], config={})


async def test_the_oracle_is_demonstrated():
    env = env_of(["leg_counting", "spiral_matrix"])
    for row in env.get_dataset():
        assert (await env.run_rollout(row, vf.Demonstrator(env), "m"))["reward"] == 1.0
    env = env_of("graph_color")
    state = await env.run_rollout(env.get_dataset()[0], vf.Demonstrator(env), "m")
    assert "graph_color has verifiers but no answers to demonstrate" in str(state["error"])
