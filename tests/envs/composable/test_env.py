"""A task set and a harness together: folders, files, variables, metrics, evaluation, and an agent that is not there."""

from __future__ import annotations

import json

import pytest

import mettle.envs as vf
from mettle.envs.composable import ComposableEnv, Harness, SandboxSpec, SandboxTaskSet, TaskSet
from mettle.envs.composable.opencode import OpenCodeEnv
from mettle.errors import UserError
from mettle.sandbox import SandboxConfig, probe

AGENT = r"""
import json, os, urllib.request
task = open("/task/instruction.md").read()
rules = open("/task/system_prompt.txt").read()
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "system", "content": rules}, {"role": "user", "content": task}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(f"{said} {os.getcwd()} {os.environ['AGENT_WORKDIR']} {os.environ['FROM_TASKS']}")
open("meta.json", "w").write(json.dumps({"metrics": {"turns": 1, "other": 2}}))
open("/task/agent.log", "w").write("worked")
"""


@pytest.fixture(autouse=True)
def isolated():
    if not probe(SandboxConfig()).is_at_least("ns"):
        pytest.skip("this host cannot isolate code")


class Repairs(SandboxTaskSet):
    """Tasks as authors write them."""

    def get_instruction(self, info):
        return f"repair {info['what']}"

    def get_sandbox_spec(self, info):
        return SandboxSpec(cpu_cores=1, memory_gb=1, timeout_minutes=5)

    def get_workdir(self, info):
        return "/work/repo"

    def get_env_vars(self):
        return {"FROM_TASKS": "yes"}

    async def setup(self, state):
        await state["sandbox_client"].execute_command(state["sandbox_id"], "echo there > /work/repo/start.txt")

    async def evaluate(self, state):
        read = await state["sandbox_client"].execute_command(state["sandbox_id"], "cat /work/repo/*.txt")
        state["test_output"] = read.stdout

    def get_rubric(self):
        def repaired(state):
            return float("bridge" in state["test_output"])

        return vf.Rubric(funcs=[repaired])


ROWS = [{"info": {"what": "the bridge"}, "answer": ""}, {"info": {"what": "the road"}, "answer": ""}]


def harness(**changes) -> Harness:
    return Harness(
        **{
            "install_script": f"printf %s {json.dumps(json.dumps(AGENT))} > /tmp/a.json;"
            " python3 -c \"import json; open('/tmp/agent.py', 'w').write(json.loads(json.load(open('/tmp/a.json'))))\"",
            "run_command": "python3 /tmp/agent.py",
            "system_prompt": "be brief",
            "log_path": "/task/agent.log",
            "metrics_path": "{workdir}/meta*.json",
            "metrics_key": "metrics",
            "metrics_keys": ["turns"],
            "metrics_prefix": "agent_",
            **changes,
        }
    )


async def rolled_out(env, client):
    state = await env.run_rollout(env.get_dataset()[0], client, "m", {})
    await env.teardown()
    return state


async def test_the_agent_works_on_the_task_and_the_tasks_judge_it(scripted, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    made = harness(
        install_script="test -f /task/src/agent.py",
        run_command="python3 /task/src/agent.py",
        upload_dir_mapping={"src": "/task/src"},
        get_upload_dirs=lambda: {"src": tmp_path, "nowhere": tmp_path},
    )
    env = ComposableEnv(Repairs(ROWS), made)
    client = scripted(lambda prompt: f"{prompt[0]['content']}: {prompt[1]['content']}")
    state = await rolled_out(env, client)
    assert state["error"] is None, state["error"]
    assert state["test_output"] == "be brief: repair the bridge /work/repo /work/repo yesthere\n"
    assert state["reward"] == 1.0
    assert state["agent_logs"] == "worked"
    assert state["agent_turns"] == 1
    assert "agent_other" not in state
    assert len(state["trajectory"]) == 1


async def test_an_agent_that_cannot_be_installed_is_the_rollouts_error(scripted):
    state = await rolled_out(
        ComposableEnv(Repairs(ROWS), harness(install_script="echo no wheel; exit 3")), scripted("x")
    )
    assert "the agent could not be installed (exit code 3): no wheel" in str(state["error"])
    assert state["reward"] is None


async def test_opencode_that_is_not_there_says_where_it_has_to_be(scripted):
    env = OpenCodeEnv([{"question": "q", "answer": "a"}], agent_workdir="/work/app")
    state = await rolled_out(env, scripted("x"))
    assert "opencode is not installed on this host" in str(state["error"])


async def test_opencode_is_told_its_model_its_task_and_its_tools(scripted):
    shim = (
        "mkdir -p /tmp/bin; printf '#!/bin/sh\\necho \"$@\" >> /task/called\\ncat $OPENCODE_CONFIG >> /task/called\\n'"
        " > /tmp/bin/opencode; chmod +x /tmp/bin/opencode"
    )

    class Looked(OpenCodeEnv):
        async def post_rollout(self, state):
            state["called"] = (await self.machine(state).exec("cat /task/called")).stdout

    env = Looked(
        [{"question": "what is it?", "answer": "a"}], agent_workdir="/work/app", disabled_tools=["webfetch"],
        install_command=shim, environment_vars={"PATH": "/tmp/bin:/usr/bin:/bin:/usr/local/bin"},
    )  # fmt: skip
    state = await rolled_out(env, scripted("x"))
    first, _, config = state["called"].partition("\n")
    assert first == "run --model mettle/m what is it?"
    assert json.loads(config)["agent"]["build"]["tools"] == {"webfetch": False}


async def test_variables_of_the_proxy_cannot_be_replaced(scripted):
    env = ComposableEnv(Repairs(ROWS), harness(environment_vars={"OPENAI_BASE_URL": "http://elsewhere"}))
    state = await env.run_rollout(env.get_dataset()[0], scripted("x"), "m", {})
    await env.teardown()
    assert isinstance(state["error"], UserError) or "OPENAI_BASE_URL is set by the environment itself" in str(
        state["error"]
    )


async def test_task_sets_are_cut_filtered_and_validated():
    tasks = Repairs(ROWS)
    assert (len(tasks), len(tasks.take(1)), len(tasks.filter(lambda row: "road" in row["info"]["what"]))) == (2, 1, 1)
    assert len(tasks) == 2
    assert tasks[1].prompt == [{"role": "user", "content": "repair the road"}]
    assert tasks[1].sandbox_spec.timeout_minutes == 5
    assert await tasks.validate(concurrency=1) == [{"index": 0, "valid": True}, {"index": 1, "valid": True}]
    assert TaskSet([{"question": "q"}])[0].prompt == [{"role": "user", "content": "q"}]
