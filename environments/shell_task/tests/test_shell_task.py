"""Every family can be done, nothing is done by doing nothing, and what only looks done earns nothing."""

from __future__ import annotations

import json

import pytest

import mettle.envs as vf
from mettle.envs import Demonstrator, load_environment
from mettle.sandbox import SandboxConfig, probe

pytestmark = pytest.mark.skipif(
    not probe(SandboxConfig()).is_at_least("ns"),
    reason="this host cannot isolate code; the environment refuses it, too",
)
NUM_FAMILIES = 25
WORKERS = "$(grep -l '[w]orker.py' /proc/[0-9]*/cmdline | cut -d/ -f3)"
DEEP = "python3 -c \"import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(900)]\""


class Types(vf.Client):
    """Gives these commands, then stops."""

    def __init__(self, *commands):
        self._commands = commands

    async def get_response(self, prompt, model, sampling_args=None, tools=None, *, state, **_):
        at = len(state["trajectory"])
        calls = None
        if at < len(self._commands):
            arguments = json.dumps({"command": self._commands[at]})
            calls = [vf.ToolCall(id=f"c{at}", name="bash", arguments=arguments)]
        finish = "tool_calls" if calls else "stop"
        message = vf.ResponseMessage(content="Done.", tool_calls=calls, finish_reason=finish, is_truncated=False)
        return vf.Response(id="", created=0, model=model, usage=None, message=message)


@pytest.fixture
async def env():
    made = load_environment("shell-task", num_train=150, num_eval=50)
    yield made
    await made.teardown()


def job_of(row):
    import shell_task

    return shell_task.job_of(row["info"])


def a_row(env, family):
    return next(row for row in env.get_dataset() if row["info"]["family"] == family)


def one_of_each(env):
    return list({row["info"]["family"]: row for row in [*env.get_dataset(), *env.get_eval_dataset()]}.values())


def told(state):
    return [message["content"] for message in state["completion"] if message["role"] == "tool"]


async def done(env, row, *commands):
    state = await env.run_rollout(row, Types(*commands), "m")
    assert state["error"] is None
    return state


async def test_every_family_is_solved_by_its_own_commands(env):
    rows = one_of_each(env)
    assert len(rows) == NUM_FAMILIES
    for row in rows:
        gold = await env.run_rollout(row, Demonstrator(env), "gold")
        assert gold["reward"] == 1.0, (row, gold["checked"], gold["completion"])


async def test_no_goal_of_any_family_is_met_by_doing_nothing(env):
    for row in one_of_each(env):
        nothing = await done(env, row)
        assert nothing["reward"] == 0.0
        assert not any(nothing["checked"]["goals"]), row["info"]
        assert all(nothing["checked"]["guards"]), row["info"]


async def test_files_and_processes_stay_and_variables_do_not(env):
    row = a_row(env, "start_order")
    state = await done(
        env,
        row,
        "x=1; echo 1 > kept; sleep 50 & echo $! > pid; pwd",
        "cat kept; kill -0 $(cat pid) && echo alive; echo [$x]",
    )
    assert told(state) == [row["info"]["folder"], "1\nalive\n[]"]


@pytest.mark.parametrize(
    "commands",
    [
        ["for f in answer.json key expected reward.txt solved; do echo 1 > $f; echo '{\"solved\": 1}' > /tmp/$f; done"],
        ["rm -rf /work/*", "echo 1 > answer.txt"],
        ["kill -9 $$", "kill -9 -1", "echo alive"],
        ["truncate -s 100G answer.txt"],
        ["head -c 100000000 /dev/zero > answer.txt"],
        ["mkfifo answer.txt"],
        ["ln -s /dev/zero answer.txt"],
        ["mkdir answer.txt"],
        ["for i in $(seq 4500); do : > f$i; done"],
        ["chmod 000 . ."],
        [DEEP],
    ],
)
async def test_what_is_no_answer_earns_nothing_and_breaks_nothing(env, commands):
    state = await done(env, a_row(env, "count_files"), *commands)
    assert state["reward"] == 0.0
    assert len(told(state)) == len(commands)


async def test_a_link_is_never_taken_for_what_it_leads_to(env):
    row = a_row(env, "log_totals")
    solution = job_of(row).solution
    folder = row["info"]["folder"]
    assert (await done(env, row, *solution))["reward"] == 1.0
    linked = await done(env, row, *solution, "mv answer.txt /tmp/it && ln -s /tmp/it answer.txt")
    assert linked["reward"] == 0.0
    moved = await done(env, row, *solution, f"cd / && mv {folder} /tmp/it && ln -s /tmp/it {folder}")
    assert moved["reward"] == 0.0


async def test_after_its_processes_were_killed_a_machine_still_works(env):
    row = a_row(env, "log_totals")
    state = await done(env, row, "kill -9 -1; kill -9 $$", *job_of(row).solution)
    assert state["reward"] == 1.0


async def test_a_script_that_knows_the_examples_fails_the_hidden_cases(env):
    row = a_row(env, "shell_filter")
    learned = """python3 - <<'END'
import pathlib
shown = {path.read_text(): path.with_suffix(".out").read_text() for path in pathlib.Path("examples").glob("*.in")}
text = "x=$(cat)\\n"
for given, wanted in shown.items():
    text += f"if [ \\"$x\\" = '{given.rstrip()}' ]; then echo '{wanted.rstrip()}'; fi\\n"
pathlib.Path("filter.sh").write_text(text)
END
for n in 1 2; do sh filter.sh < examples/$n.in | diff - examples/$n.out && echo same; done"""
    state = await done(env, row, learned)
    assert told(state) == ["same\nsame"]
    assert state["reward"] == 0.0


async def test_programs_put_in_the_place_of_the_machines_have_no_say(env):
    row = a_row(env, "shell_filter")
    forged = 'for p in sh awk cat ls find python3; do printf "#!/bin/bash\\necho 1\\n" > /opt/bin/$p; chmod 755 /opt/bin/$p; done'
    state = await done(env, row, forged, "echo 'echo 1' > filter.sh")
    assert state["reward"] == 0.0
    solved = await done(env, row, *job_of(row).solution, forged)
    assert solved["reward"] == 1.0


async def test_too_many_or_too_deep_folders_are_not_looked_through(env):
    row = a_row(env, "clean_up")
    deep = f"cd tree; {DEEP}"
    assert (await done(env, row, *job_of(row).solution, deep))["reward"] == 0.0
    assert (await done(env, row, *job_of(row).solution, "cd tree; mkdir $(seq 900)"))["reward"] == 0.0


async def test_a_script_that_never_ends_or_floods_is_no_error(env, monkeypatch):
    import shell_leftovers

    monkeypatch.setattr(shell_leftovers, "CASE_S", 0.3)
    row = a_row(env, "repair_script")
    for source in ("sleep 100", "yes"):
        state = await done(env, row, f"echo '{source}' > job.sh")
        assert state["reward"] == 0.0


async def test_stopping_every_process_stops_too_many(env):
    row = a_row(env, "stop_runaway")
    state = await done(env, row, f"kill {WORKERS}")
    assert state["checked"] == {"goals": [True], "guards": [False, False]}
    assert (state["reward"], state["metrics"]["fraction_met"]) == (0.0, 0.0)
    paused = await done(env, row, f"kill -STOP {WORKERS}")
    assert paused["checked"]["goals"] == [False]


async def test_partial_credit_is_the_share_of_goals_and_harm_costs_all_of_it():
    env = load_environment("shell-task", families=["permissions"], partial_credit=True, num_train=5, num_eval=5)
    row = env.get_dataset()[0]
    job = job_of(row)
    scripts = job.solution[0].split(" && ")[0]
    state = await done(env, row, scripts)
    assert state["reward"] == pytest.approx(4 / len(job.goals))
    assert (await done(env, row, scripts, "chmod 600 app/*.txt"))["reward"] == 0.0
    assert (await done(env, row, *job.solution))["reward"] == 1.0
    await env.teardown()


async def test_no_machine_is_left_behind(env):
    await done(env, a_row(env, "python_report"), "true")
    await env.run_rollout(a_row(env, "python_report"), Demonstrator(env), "gold")
    assert env.active_sandboxes == set()


def test_splits_share_no_question_and_rows_hold_no_result(env):
    train, evaluation = env.get_dataset(), env.get_eval_dataset()
    assert (len(train), len(evaluation)) == (150, 50)
    questions = [*train["question"], *evaluation["question"]]
    assert len(set(questions)) == 200
    assert all(set(row["info"]) == {"family", "seed", "folder"} for row in train)


def test_unknown_families_are_refused():
    with pytest.raises(RuntimeError, match="poems"):
        load_environment("shell-task", families=["poems"])
