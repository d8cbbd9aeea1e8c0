"""The shipped agent solves every family through the proxy; what only looks done earns nothing; any agent will do."""

from __future__ import annotations

import json
import random

import pytest

import mettle.envs as vf
from mettle.envs import Demonstrator, load_environment
from mettle.sandbox import SandboxConfig, probe

pytestmark = pytest.mark.skipif(
    not probe(SandboxConfig()).is_at_least("ns"),
    reason="this host cannot isolate code; the environment refuses it, too",
)


class Says(vf.Client):
    """Calls the agent's tools as told, then stops."""

    def __init__(self, *steps):
        self._steps = steps

    async def get_response(self, prompt, model, sampling_args=None, tools=None, *, state, **_):
        at = len(state["trajectory"])
        calls = None
        if at < len(self._steps):
            name, arguments = self._steps[at]
            calls = [vf.ToolCall(id=f"c{at}", name=name, arguments=json.dumps(arguments))]
        finish = "tool_calls" if calls else "stop"
        message = vf.ResponseMessage(content="Done.", tool_calls=calls, finish_reason=finish, is_truncated=False)
        return vf.Response(id="", created=0, model=model, usage=None, message=message)


def run(command):
    return "run", {"command": command}


@pytest.fixture
async def env():
    made = load_environment("agent-task", num_train=60, num_eval=20)
    yield made
    await made.teardown()


def a_row(env, family):
    return next(row for row in env.get_dataset() if row["info"]["family"] == family)


def job_of(row):
    import agent_task

    return agent_task.job_of(row["info"])


def solution(row):
    return [(step.tool, dict(step.arguments)) for step in job_of(row).solution]


async def done(env, row, *steps):
    state = await env.run_rollout(row, Says(*steps), "m")
    assert state["error"] is None
    return state


async def test_every_family_is_solved_by_what_is_demonstrated_and_not_by_nothing(env):
    rows = list({row["info"]["family"]: row for row in env.get_dataset()}.values())
    assert len(rows) == 5
    for row in rows:
        gold = await env.run_rollout(row, Demonstrator(env), "gold")
        assert gold["reward"] == 1.0, (row, gold["judged"], gold["completion"])
        assert gold["agent_exit_code"] == 0
        assert len(gold["trajectory"]) == len(job_of(row).solution) + 1
        nothing = await done(env, row)
        assert nothing["reward"] == 0.0
        assert not any(nothing["judged"]["goals"])
        assert all(nothing["judged"]["guards"])


@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_the_agent_speaks_the_other_dialects_too(dialect):
    env = load_environment("agent-task", dialect=dialect, num_train=10, num_eval=5)
    row = a_row(env, "invoices")
    gold = await env.run_rollout(row, Demonstrator(env), "gold")
    assert gold["reward"] == 1.0, gold["completion"]
    assert {step["extras"]["dialect"] for step in gold["trajectory"]} == {dialect}
    assert [message["role"] for message in gold["completion"]] == ["assistant", "tool"] * 3 + ["assistant"]
    await env.teardown()


def test_each_mistake_is_seen_by_some_shown_and_some_hidden_call(env):
    import agent_code_jobs
    import agent_parts

    for part in agent_parts.PARTS:
        broken = [agent_code_jobs.mistaken(part, *mistake) for mistake in part.mistakes]
        broken += [agent_code_jobs.without_body(part.source, function) for function in part.functions]
        for source in broken:
            _, wrong, right = agent_code_jobs._calls(random.Random(7), part, source)
            assert wrong, (part.name, source)
            assert right or "NotImplementedError" in source, (part.name, source)
        _, wrong, _ = agent_code_jobs._calls(random.Random(0), part, part.source)
        assert not wrong


async def test_tests_made_to_pass_earn_nothing(env):
    row = a_row(env, "repair")
    cheat = run("echo 'print(0)' > tests.py; python3 tests.py")
    assert (await done(env, row, cheat))["reward"] == 0.0


async def test_programs_that_learn_the_examples_fail_the_hidden_calls(env):
    row = a_row(env, "implement")
    learn = """python3 - <<'END'
import re
tests = open("tests.py").read()
learned = {}
for line in tests.splitlines():
    if line.startswith("check("):
        module, function, args, expected = eval(line.removeprefix("check"))
        learned.setdefault((module, function), []).append((args, expected))
for (module, function), known in learned.items():
    if "NotImplementedError" in open(f"{module}.py").read():
        with open(f"{module}.py", "a") as file:
            file.write(f"\\nold_{function} = {function}\\ndef {function}(*args):\\n")
            file.write(f"    for given, wanted in {known!r}:\\n        if given == args:\\n            return wanted\\n")
            file.write(f"    return old_{function}(*args)\\n")
END
python3 tests.py"""
    state = await done(env, row, run(learn))
    assert "0 failed" in next(m["content"] for m in state["completion"] if m["role"] == "tool")
    assert state["reward"] == 0.0


@pytest.mark.parametrize(
    "module",
    ["import os\nos._exit(0)", "import sys\nsys.exit(0)", "while True: pass", "print('[1]\\n' * 100)\n", "raise Exception",
     "import json\njson.dumps = lambda value: '[true]'"],
)  # fmt: skip
async def test_modules_that_end_flood_or_forge_are_no_solution(env, module, monkeypatch):
    import agent_task

    monkeypatch.setattr(agent_task, "JUDGE_S", 0.5)
    row = a_row(env, "repair")
    broken = [step[1]["path"] for step in solution(row) if step[0] == "write_file"]
    state = await done(env, row, ("write_file", {"path": broken[0], "content": module}))
    assert (state["reward"], state["metrics"]["fraction_met"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    "command",
    ["rm -rf /work/project", "truncate -s 100G fixed.json", "mkfifo fixed.json", "ln -s /dev/zero fixed.json",
     "python3 -c \"print('[' * 100000)\" > fixed.json", "kill -9 -1", "rm -rf /agent /task"],
)  # fmt: skip
async def test_what_is_no_result_earns_nothing(env, command):
    state = await env.run_rollout(a_row(env, "contacts"), Says(run(command)), "m")
    assert not state["reward"]
    if state["error"] is not None:
        assert "kill" in command
        assert "exit code" in str(state["error"])


async def test_what_was_right_has_to_stay_right():
    env = load_environment("agent-task", families=["repair"], partial_credit=True, num_train=10, num_eval=5)
    row = env.get_dataset()[0]
    untouched = next(
        path for path in job_of(row).files if path not in {step[1].get("path") for step in solution(row)} | {"tests.py"}
    )
    assert (await done(env, row, *solution(row)))["reward"] == 1.0
    assert (await done(env, row, *solution(row), run(f"echo > {untouched}")))["reward"] == 0.0
    await env.teardown()


async def test_your_own_program_is_run(tmp_path):
    own = tmp_path / "mine.py"
    own.write_text(
        "import json, os, urllib.request\n"
        "body = {'model': 'x', 'messages': [{'role': 'user', 'content': open('/task/instruction.md').read()}]}\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()\n"
        "open('seen', 'w').write(open('RULES.md').read())\n"
    )
    env = load_environment("agent-task", agent=str(own), families=["readings"], num_train=5, num_eval=5)
    state = await done(env, env.get_dataset()[0])
    assert (len(state["trajectory"]), state["reward"], state["agent_exit_code"]) == (1, 0.0, 0)
    await env.teardown()
    folder = load_environment("agent-task", agent=str(tmp_path), run_command="python3 /agent/mine.py", num_train=5)
    state = await done(folder, a_row(folder, "readings"))
    assert len(state["trajectory"]) == 1
    await folder.teardown()


async def test_a_program_that_fails_is_an_error_and_no_reward(tmp_path):
    (tmp_path / "bad.py").write_text("raise SystemExit('no such thing')")
    env = load_environment("agent-task", agent=str(tmp_path / "bad.py"), num_train=5, num_eval=5)
    state = await env.run_rollout(env.get_dataset()[0], Says(), "m")
    assert "no such thing" in str(state["error"])
    await env.teardown()


async def test_turns_end_where_they_are_limited():
    env = load_environment("agent-task", max_turns=2, num_train=5, num_eval=5)
    state = await done(env, env.get_dataset()[0], *[run("true")] * 5)
    assert len(state["trajectory"]) == 2
    await env.teardown()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"families": ["poems"]}, "poems"), ({"dialect": "morse"}, "morse"), ({"agent": "/nowhere.py"}, "not there")],
)
def test_wrong_arguments_are_refused(wrong, why):
    with pytest.raises(RuntimeError, match=why):
        load_environment("agent-task", **wrong)


def test_splits_share_no_question_and_rows_hold_no_result(env):
    train, evaluation = env.get_dataset(), env.get_eval_dataset()
    assert len({*train["question"], *evaluation["question"]}) == 80
    assert all(set(row["info"]) == {"family", "seed"} for row in train)
