"""The problems, their solutions in the sandbox, and what does not count as one."""

from __future__ import annotations

import json
import sys

import pytest

from mettle.envs import Demonstrator, load_environment
from mettle.sandbox import SandboxConfig, probe


@pytest.fixture(scope="module", autouse=True)
def _needs_isolation():
    if not probe(SandboxConfig()).is_at_least("ns"):
        pytest.skip("this host cannot isolate code")


@pytest.fixture
async def env():
    made = load_environment("code-judge", num_train=300, num_eval=60)
    yield made
    await made.teardown()


def said(env, code):
    return [{"role": "assistant", "content": env.parser.format(code)}]


async def judged(env, row, text):
    from mettle.envs import Response, ResponseMessage

    class Says:
        async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
            message = ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
            return Response(id="", created=0, model=model, usage=None, message=message)

    return await env.run_rollout(row, Says(), "m")


async def test_every_kind_of_solution_passes_its_own_tests_in_the_sandbox(env):
    seen = {}
    for row in [*env.get_eval_dataset(), *env.get_dataset()]:
        seen.setdefault(row["info"]["family"], row)
    assert len(seen) >= 12
    for row in seen.values():
        state = await env.run_rollout(row, Demonstrator(env), "gold")
        assert state["reward"] == 1.0, (row["question"], state["judged"])
        assert state["judged"]["isolation"] == "ns"


async def test_what_only_fits_the_examples_fails(env):
    row = next(row for row in env.get_dataset() if row["info"]["family"] == "pipeline over numbers")
    shown = json.loads(row["info"]["tests"])[2:4]
    table = {repr(test["args"][0]): test["expected"] for test in shown}
    state = await judged(env, row, env.parser.format(f"def solve(numbers):\n    return {table!r}[repr(numbers)]"))
    assert state["reward"] == 0.0
    assert state["metrics"]["format_has_code"] == 1.0
    assert state["error"] is None


@pytest.mark.parametrize(
    "text",
    ["", "no code", "```python\ndef solve(", "```python\nimport os; os._exit(0)\n```", "```js\nlet x\n```",
     "<think>```python\nprint(1)\n```</think> done"],
)  # fmt: skip
async def test_no_program_no_reward(env, text):
    state = await judged(env, env.get_dataset()[0], text)
    assert state["reward"] == 0.0
    assert state["error"] is None


def test_splits_share_no_problem_and_both_kinds_are_there(env):
    train, evaluation = env.get_dataset(), env.get_eval_dataset()
    assert (len(train), len(evaluation)) == (300, 60)
    assert not set(train["question"]) & set(evaluation["question"])
    kinds = {"function" in json.loads(row["info"]["tests"])[0] for row in train}
    assert kinds == {True, False}


def test_tests_tell_problems_apart(env):
    """A problem whose answer never changes rewards a constant."""
    rows = list(env.get_dataset(n=200))
    constant = [row for row in rows if len({json.dumps(t["expected"]) for t in json.loads(row["info"]["tests"])}) == 1]
    assert len(constant) <= len(rows) * 0.02


async def test_partial_credit_is_the_share_of_tests():
    env = load_environment("code-judge", kinds=["functions"], partial_credit=True, num_train=50, num_eval=5)
    row = next(row for row in env.get_dataset() if "their sum" in row["question"])
    expected = [test["expected"] for test in json.loads(row["info"]["tests"])]
    state = await judged(env, row, env.parser.format(f"def solve(numbers):\n    return {expected[0]}"))
    assert state["reward"] == pytest.approx(expected.count(expected[0]) / len(expected))
    await env.teardown()


def test_mbpp_is_brought_into_the_same_shape(monkeypatch):
    datasets = pytest.importorskip("datasets")
    tests = ["assert add(1, 2) == 3", "assert add([1], []) == [1]", "assert check(add)", "assert add({1}, 2) == {1}"]
    rows = [{"prompt": "Add.", "code": "def add(a, b):\n    return a + b", "test_list": tests}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    env = load_environment("code-judge", source="mbpp")
    [row] = list(env.get_dataset())
    assert json.loads(row["info"]["tests"]) == [
        {"function": "add", "args": [1, 2], "expected": 3},
        {"function": "add", "args": [[1], []], "expected": [1]},
    ]
    module = sys.modules["code_judge"]
    assert module.call_test("import os") is None
    assert module.call_test("assert f(x) == 1") is None


@pytest.mark.parametrize("wrong", [{"source": "web"}, {"kinds": ["poems"]}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(RuntimeError, match="not"):
        load_environment("code-judge", **wrong)


async def test_a_formula_may_be_written_in_any_way_that_comes_to_the_same():
    env = load_environment("code-judge", kinds=["formulas"])
    rows = {row["question"].split(".")[0]: row for row in [*env.get_dataset(), *env.get_eval_dataset()]}
    assert len(rows) > 500
    row = rows["`solve(x)`: add 3, then multiply by 4"]
    for code, reward in (("(x + 3) * 4", 1.0), ("4 * x + 12", 1.0), ("x + 3 * 4", 0.0)):
        state = await judged(env, row, env.parser.format(f"def solve(x):\n    return {code}"))
        assert (state["reward"], state["error"]) == (reward, None)
    gold = await env.run_rollout(rows["`solve(x)`: subtract 2, then add 9"], Demonstrator(env), "gold")
    assert gold["reward"] == 1.0
    await env.teardown()


@pytest.fixture
async def formulas():
    args = {"answer_format": "bare", "num_shown": 0, "shown": "careless", "max_remembered": 1000}
    made = load_environment("code-judge", kinds=["formulas"], **args)
    yield made
    await made.teardown()


async def test_a_careless_solution_is_judged_wrong_where_it_slipped_and_nowhere_else(formulas):
    rows, rewards, slipped = list(formulas.get_dataset())[:60], [], []
    for row in rows:
        state = await formulas.run_rollout(row, Demonstrator(formulas), "careless")
        assert state["error"] is None
        rewards.append(state["reward"])
        slipped.append(state["completion"][-1]["content"] != row["answer"].strip())
    assert [reward == 0.0 for reward in rewards] == slipped
    assert 0.4 < sum(slipped) / 60 < 0.8


async def test_a_bare_answer_is_the_program_and_shows_no_test(formulas):
    row = formulas.get_dataset()[0]
    assert row["question"].endswith(".")
    assert [message["role"] for message in row["prompt"]] == ["user"]
    assert (await judged(formulas, row, row["answer"]))["reward"] == 1.0
    for text in ("", f"```python\n{row['answer']}```", "def solve(x):"):
        assert (await judged(formulas, row, text))["reward"] == 0.0


def test_equal_programs_are_run_once_only_where_that_is_asked_for(formulas, env):
    assert (formulas.rubric.sandbox.max_remembered, env.rubric.sandbox.max_remembered) == (1000, 0)


@pytest.mark.parametrize("wrong", [{"answer_format": "xml"}, {"shown": "never"}, {"shown": "careless"}])
def test_ways_to_show_and_answer_that_are_none_are_refused(wrong):
    with pytest.raises(RuntimeError, match="not"):
        load_environment("code-judge", **wrong)
