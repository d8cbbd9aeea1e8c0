"""Code judged for a reward: what is stored, what is an error, and what becomes of the sandboxes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import mettle.envs as vf
from mettle.envs.rubrics.code_rubric import tests_of as read_tests
from mettle.sandbox import SandboxConfig, StdioTest, probe

TESTS = [{"stdin": "2 3", "expected": "5"}, {"stdin": "4 4", "expected": "8"}]
RIGHT = "```python\nprint(sum(map(int, input().split())))\n```"
HALF = "```python\nprint(5)\n```"


@pytest.fixture(scope="module", autouse=True)
def _needs_isolation():
    if not probe(SandboxConfig()).is_at_least("ns"):
        pytest.skip("this host cannot isolate code")


def environment(tests=TESTS, **options):
    rubric = vf.CodeRubric(**options)
    rows = [{"question": "add", "info": {"tests": tests}}]
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric, parser=rubric.parser)


def says(text):
    env = environment()
    env.demonstrate = lambda messages, row: text
    return vf.Demonstrator(env)


async def run(env, text):
    return await env.run_rollout(env.get_dataset()[0], says(text), "m")


async def test_verdicts_and_isolation_are_kept_and_judging_stops_at_the_first_failure():
    env = environment()
    right, half = await run(env, RIGHT), await run(env, HALF)
    assert (right["reward"], half["reward"]) == (1.0, 0.0)
    assert right["judged"]["verdicts"] == ["passed", "passed"]
    assert half["judged"]["verdicts"] == ["passed", "wrong"]
    assert right["judged"]["isolation"] == "ns"
    await env.teardown()


async def test_partial_credit():
    env = environment(partial_credit=True)
    assert (await run(env, HALF))["reward"] == 0.5
    await env.teardown()


@pytest.mark.parametrize("tests", [[], None, [{"stdin": "1"}], [{"expected": "1", "cheat": 1}], "{"])
async def test_a_row_without_sound_tests_is_an_error_and_no_zero(tests):
    env = environment(tests)
    state = await run(env, RIGHT)
    assert state["reward"] is None
    assert state["error"] is not None
    await env.teardown()


async def test_a_host_that_cannot_isolate_is_an_error_and_no_zero(monkeypatch):
    env = environment()

    async def refused(self):
        raise vf.SandboxError("this host gives no isolation")

    monkeypatch.setattr("mettle.sandbox.SandboxPool.__aenter__", refused)
    state = await run(env, RIGHT)
    assert state["reward"] is None
    assert "no isolation" in str(state["error"])


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_a_second_event_loop_gets_a_pool_of_its_own_and_the_first_one_ends():
    env = environment()
    pids = []
    for _ in range(2):
        assert asyncio.run(run(env, RIGHT))["reward"] == 1.0
        pids.append(env.rubric.rubrics[0]._pool.template_pid)
    assert has_ended(pids[0])
    asyncio.run(env.teardown())
    assert env.rubric.rubrics[0]._pool is None


async def test_many_are_judged_side_by_side():
    env = environment()
    states = await asyncio.gather(*(run(env, RIGHT if i % 2 else HALF) for i in range(24)))
    assert [state["reward"] for state in states] == [float(i % 2) for i in range(24)]
    await env.teardown()


def test_tests_are_read_from_text_too():
    [test] = read_tests({"tests": '[{"stdin": "1", "expected": "2"}]'})
    assert test == StdioTest(stdin="1", expected="2")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\n```\nb\n```", "a\n"),
        ("```\nb\n```", "b\n"),
        ("````python\n```\ninner\n```\n````", "```\ninner\n```\n"),
        ("~~~py\na\n~~~", "a\n"),
        ("```python\ncut off", ""),
        ("```js\nno\n```", ""),
        ("<think>```python\ndraft\n```</think>```python\nfinal\n```", "final\n"),
        ("a = 1", ""),
    ],
)
def test_the_program_is_the_last_block_of_its_language(text, code):
    assert vf.CodeParser().parse(text) == code


async def run_row(text, info, **options):
    rubric = vf.CodeRubric(**options)
    env = vf.SingleTurnEnv(dataset=[{"question": "q", "info": info}], rubric=rubric, parser=rubric.parser)
    state = await run(env, text)
    await env.teardown()
    return state


async def test_a_row_names_its_language_and_the_code_is_found_by_its_mark():
    info = {"tests": TESTS, "language": "bash"}
    text = "```python\nprint(5)\n```\nor\n```sh\nread a b; echo $((a + b))\n```\n"
    assert (await run_row(text, info))["reward"] == 1.0
    assert (await run_row(text, {"tests": TESTS}, language="bash"))["reward"] == 1.0
    assert (await run_row(text, {"tests": TESTS}))["judged"]["verdicts"] == ["passed", "wrong"]


async def test_a_row_names_its_rules():
    info = {"tests": [{"expected": "B\na", "compare": "lines", "any_order": True, "ignore_case": True}]}
    assert (await run_row("```python\nprint('A'); print('b')\n```", info))["reward"] == 1.0


async def test_a_row_brings_its_checker():
    tests = [{"stdin": "12", "expected": ""}]
    python = "def check(stdin, expected, output): return 0.5 if output.strip() == '6' else output.strip() == '3'"
    program = {"code": "read n < $1; read d < $2; [ $((n % d)) = 0 ]", "language": "bash"}
    three, six, five = ("```python\nprint(" + n + ")\n```" for n in "365")
    for checker, texts in ((python, (three, six, five)), (program, (three, six, five))):
        info = {"tests": tests, "checker": checker}
        found = [(await run_row(text, info))["reward"] for text in texts]
        assert found == ([1.0, 0.0, 0.0] if checker is python else [1.0, 1.0, 0.0])
    state = await run_row(six, {"tests": tests, "checker": python}, partial_credit=True)
    assert state["reward"] == 0.5


@pytest.mark.parametrize("checker", [{"code": "x", "cheat": 1}, {"language": "bash"}, "def check(*a): return 7"])
async def test_a_row_without_a_sound_checker_is_an_error_and_no_zero(checker):
    state = await run_row(RIGHT, {"tests": TESTS, "checker": checker})
    assert state["error"] is not None
