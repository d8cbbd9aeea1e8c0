"""Harbor's task folders in the embedded sandbox: worlds, agents, tests, and what agents try with the tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import mettle.envs as vf
from mettle.errors import UserError
from mettle_harbor.dockerfile import read_dockerfile
from mettle_harbor.env import HarborEnv
from mettle_harbor.servers import HarborMCPHealthcheck
from mettle_harbor.tasks import find_tasks

TASK = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 30.0
env = { WANTED = "42" }
[agent]
timeout_sec = 20.0
[environment]
memory_mb = 256
storage = "20M"
"""
TEST = """
if [ "$(cat answer.txt 2>/dev/null)" = "$WANTED" ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
DOCKERFILE = """
# a comment
FROM python:3.11-slim AS base
ARG UNUSED=1
ENV GREETING="hello world" PLACE=/app
WORKDIR /app
COPY data/ ./data/
COPY seed.txt seed2.txt /app/seeds/
RUN mkdir -p $PLACE/made && \\
    echo "$GREETING" > $PLACE/made/greeting
CMD ["sleep", "infinity"]
"""


ASK = """python3 -c '
import os, urllib.request
body = b"{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"q\\"}]}"
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)).read()
' || exit 9
"""
"""What makes a command an agent: it asks the model."""


def make_task(root, name="answer", toml=TASK, test=TEST, dockerfile=DOCKERFILE):
    folder = root / name
    for inner in ("tests", "solution", "environment/data"):
        (folder / inner).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Write 42 to answer.txt.\n")
    (folder / "tests" / "test.sh").write_text(test)
    (folder / "solution" / "solve.sh").write_text("echo 42 > answer.txt\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "data" / "numbers.csv").write_text("1,2\n")
    for seed in ("seed.txt", "seed2.txt"):
        (folder / "environment" / seed).write_text(seed)
    return folder


async def run(env, model, index=0):
    try:
        return await env.run_rollout(env.get_dataset()[index], model, "policy")
    finally:
        await env.teardown()


@pytest.mark.parametrize(
    ("command", "reward"), [("echo 42 > answer.txt", 1.0), ("echo 41 > answer.txt", 0.0), ("true", 0.0)]
)
async def test_the_tests_of_a_task_give_the_reward(tmp_path, scripted, command, reward):
    make_task(tmp_path)
    state = await run(HarborEnv(ASK + command, tmp_path, poll_interval=0.2), scripted("yes"))
    assert state["error"] is None
    assert (state["reward"], state["metrics"]["harbor_reward"]) == (reward, reward)
    assert state["task"]["info"]["task_name"] == "answer"


async def test_an_agent_finds_its_world_and_its_instruction_and_no_tests(tmp_path, scripted):
    make_task(tmp_path)
    look = (
        "pwd; cat $HARBOR_INSTRUCTION_PATH; echo; cat data/numbers.csv seeds/seed.txt seeds/seed2.txt; echo; cat made/greeting;"
        "ls -d /tests /oracle /solution 2>/dev/null; ls /task; echo $GREETING $HARBOR_TASK_NAME $AGENT_WORKDIR"
    )
    state = await run(HarborEnv(look, tmp_path, poll_interval=0.2), scripted("yes"))
    assert state["agent_stdout"].splitlines() == [
        "/app", "Write 42 to answer.txt.", "1,2", "seed.txtseed2.txt", "hello world",
        "instruction.md", "prompt.json", "task.toml", "hello world answer /app",
    ]  # fmt: skip


async def test_an_agent_that_plants_rewards_tests_programs_or_processes_gains_nothing(tmp_path, scripted):
    make_task(tmp_path)
    cheat = """
mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh
for name in bash cat sh; do printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt; echo 42' > /opt/bin/$name; chmod +x /opt/bin/$name; done
(setsid sh -c 'while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 42 > /app/answer.txt.tmp; done' >/dev/null 2>&1 &)
echo 41 > answer.txt
"""
    state = await run(HarborEnv(ASK + cheat, tmp_path, poll_interval=0.2), scripted("yes"))
    assert state["error"] is None
    assert state["reward"] == 0.0


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("echo broken >&2; exit 1", "exit code 1: broken"),
        ("echo high > /logs/verifier/reward.txt", "'high', which is no reward"),
        ("echo nan > /logs/verifier/reward.txt", "no reward|reward nan"),
        ('echo "{\\"score\\": 1}" > /logs/verifier/reward.json', "no reward"),
    ],
)
async def test_tests_that_give_no_reward_are_an_error_and_never_a_zero(tmp_path, scripted, test, words):
    make_task(tmp_path, test=test)
    state = await run(HarborEnv("true", tmp_path, poll_interval=0.2), scripted("yes"))
    assert isinstance(state["error"], vf.JudgeError)
    assert state["reward"] is None
    with pytest.raises(vf.JudgeError, match=words):
        raise state["error"]


async def test_a_reward_may_be_json_and_tests_that_hang_run_out_of_their_time(tmp_path, scripted):
    make_task(tmp_path, "json", test='echo "{\\"reward\\": 0.25}" > /logs/verifier/reward.json')
    make_task(tmp_path, "slow", toml=TASK.replace("30.0", "0.5"), test="sleep 60")
    env = HarborEnv(ASK, tmp_path, poll_interval=0.2)
    states = [await env.run_rollout(row, scripted("yes"), "policy") for row in env.get_dataset()]
    await env.teardown()
    assert states[0]["reward"] == 0.25
    assert "ran out of time" in str(states[1]["error"])


async def test_the_agents_own_time_limit_ends_it_and_the_tests_still_run(tmp_path, scripted):
    make_task(tmp_path, toml=TASK.replace("20.0", "3.0"))
    state = await run(HarborEnv(ASK + "echo 42 > answer.txt; sleep 60", tmp_path, poll_interval=0.2), scripted("yes"))
    assert (state["stop_condition"], state["timed_out"], state["error"]) == ("timeout_reached", True, None)
    assert state["reward"] == 1.0


async def test_a_world_that_needs_a_network_is_an_error_that_names_its_line(tmp_path, scripted):
    make_task(tmp_path, dockerfile="FROM x\nRUN echo fetching >&2; false\n")
    state = await run(HarborEnv("true", tmp_path, poll_interval=0.2), scripted("yes"))
    assert isinstance(state["error"], vf.SandboxError)
    assert "Dockerfile:2: exit code 1" in str(state["error"])
    assert state["reward"] is None


async def test_servers_of_a_task_run_before_its_agent_and_are_told_to_it(tmp_path, scripted):
    servers = '[[environment.mcp_servers]]\nname = "my-docs"\ntransport = "http"\nurl = "http://docs:8123/mcp"\n'
    make_task(tmp_path, toml=TASK + servers)
    command = (
        "python3 -c \"import os, urllib.request as u; print(u.urlopen(os.environ['HARBOR_MCP_MY_DOCS_URL']).status)\""
    )
    launch = {"my-docs": "mkdir -p /srv2/mcp && cd /srv2 && python3 -m http.server 8123 --bind 127.0.0.1"}
    check = HarborMCPHealthcheck(interval_sec=0.1)
    env = HarborEnv(ASK + command, tmp_path, mcp_launch_commands=launch, mcp_healthcheck=check, poll_interval=0.2)
    state = await run(env, scripted("yes"))
    assert state["agent_stdout"] == "200\n", state["error"]
    failing = HarborEnv(ASK + command, tmp_path, mcp_launch_commands={"my-docs": "exit 7"}, mcp_healthcheck=check)
    state = await run(failing, scripted("yes"))
    assert "'my-docs' ended with exit code 7" in str(state["error"])


def test_tasks_are_chosen_by_name_and_what_is_wrong_is_said_at_once(tmp_path):
    with pytest.raises(UserError, match="no Harbor tasks"):
        find_tasks(tmp_path)
    make_task(tmp_path, "b")
    make_task(tmp_path / "nested", "a")
    assert [task.name for task in find_tasks(tmp_path)] == ["b", "a"]
    assert [task.name for task in find_tasks(tmp_path, ["a"])] == ["a"]
    with pytest.raises(UserError, match=r"no tasks \['c'\]"):
        find_tasks(tmp_path, ["c"])
    task = find_tasks(tmp_path, ["a"])[0]
    assert (task.size_gb("memory"), task.size_gb("storage"), task.agent_timeout_s) == (0.25, 20 / 1024, 20.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "task.toml").write_text("a ="), "cannot be read"),
        (lambda f: (f / "tests" / "test.sh").unlink(), "no tests/test.sh"),
        (lambda f: (f / "environment" / "docker-compose.yaml").write_text(""), "several containers"),
        (lambda f: (f / "task.toml").write_text("[environment]\ngpus = 2"), "2 GPUs"),
        (lambda f: (f / "environment" / "Dockerfile").write_text("COPY --from=base /a /b"), "another stage"),
        (lambda f: (f / "environment" / "Dockerfile").write_text("ADD https://x.org/a /b"), "no network"),
        (lambda f: (f / "environment" / "Dockerfile").write_text("COPY nothing /b"), "nothing is not in"),
        (lambda f: (f / "environment" / "Dockerfile").write_text("COPY ../tests /b"), "tests is not in"),
        (lambda f: (f / "environment" / "Dockerfile").write_text("FLY away"), "Dockerfile:1: FLY"),
    ],
)
def test_a_folder_that_cannot_be_run_is_refused_when_it_is_read(tmp_path, change, words):
    change(make_task(tmp_path))
    with pytest.raises(UserError, match=words):
        HarborEnv("true", tmp_path)


def test_a_dockerfile_keeps_the_variables_of_each_moment(tmp_path):
    make_task(tmp_path)
    path = tmp_path / "answer" / "environment" / "Dockerfile"
    path.write_text(
        'ENV A=1\nRUN echo $A\nENV A=2 B="$A x"\nWORKDIR /w\nWORKDIR sub\nRUN ["echo", "a b"]\nCOPY . /all\n'
    )
    world = read_dockerfile(path)
    assert [step.env for step in world.steps] == [{"A": "1"}, {"A": "2", "B": "1 x"}, {"A": "2", "B": "1 x"}]
    assert (world.workdir, world.steps[1].command) == ("/w/sub", "echo 'a b'")
    assert set(world.steps[2].files) == {"/all/data/numbers.csv", "/all/seed.txt", "/all/seed2.txt"}
    assert shutil.which("sh")
    assert isinstance(world.steps[2].files["/all/seed.txt"], Path)
