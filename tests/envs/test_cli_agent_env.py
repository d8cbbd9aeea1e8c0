"""Agents in machines: a whole rollout, and every way in which an agent can end badly."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

import mettle.envs as vf
from mettle.envs.cli_agent_env import AgentError, CliAgentEnv
from mettle.envs.sandboxes.shared import shared_machines
from mettle.errors import UserError
from mettle.runs.ports import free_port

AGENT = Path(__file__).parent / "agents" / "tool_agent.py"


def adds(prompt):
    """Calls the tool twice, then gives the last result as the answer."""
    results = [message["content"] for message in prompt if message["role"] == "tool"]
    if len(results) < 2:
        arguments = {"a": int(results[-1]) if results else 1, "b": 2}
        call = {"id": f"c{len(results)}", "name": "add", "arguments": json.dumps(arguments)}
        return {"content": None, "reasoning_content": "hm", "tool_calls": [call], "finish_reason": "tool_calls"}
    return results[-1]


def right(state, answer):
    return float(state["artifacts"]["/work/answer.txt"] == answer)


def make_env(command="python3 /work/agent.py", **options):
    options = {
        "artifacts": ["/work/answer.txt"],
        "memory_gb": 0.25,
        "disk_size_gb": 0.02,
        "poll_interval": 0.2,
        **options,
    }
    files = {"/work/agent.py": AGENT.read_bytes(), **options.pop("files", {})}
    row = {"question": "What is 1 + 2 + 2?", "answer": "5"}
    rubric = options.pop("rubric", None) or vf.Rubric([right])
    return CliAgentEnv(command, dataset=[row], rubric=rubric, files=files, **options)


async def run(env, model, **options):
    try:
        return await env.run_rollout(env.get_dataset()[0], model, "policy", **options)
    finally:
        await env.teardown()


@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_an_agent_with_tools_is_a_rollout_with_a_reward_from_its_files(scripted, dialect):
    model = scripted(adds)
    state = await run(make_env(f"python3 /work/agent.py {dialect}"), model)
    assert state["error"] is None, state["agent_stderr"]
    assert (state["reward"], state["stop_condition"], state["agent_exit_code"]) == (1.0, "agent_completed", 0)
    assert state["agent_stdout"] == "wrote 5\n"
    assert [message["role"] for message in state["completion"]] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert state["completion"][0].reasoning_content == "hm"
    assert [step["prompt"][0]["content"] for step in state["trajectory"]] == ["What is 1 + 2 + 2?"] * 3
    assert state["trajectory"][2]["prompt"][1] is state["trajectory"][0]["completion"][0]
    assert model.calls[0]["tools"][0].name == "add"
    assert state["metrics"]["agent_error"] == state["metrics"]["agent_timeout"] == 0.0
    assert state["agent_calls"] == {"answered": 3, "repeated": 0, "refused": 0, "refusals": []}


async def test_an_agent_that_needs_more_turns_is_told_that_it_is_over_and_is_no_error(scripted):
    state = await run(make_env(max_turns=2), scripted(adds))
    assert (state["stop_condition"], state["error"]) == ("max_turns_reached", None)
    assert len(state["trajectory"]) == 2
    assert "max_turns_reached" in state["agent_stderr"]
    assert state["reward"] == 0.0


async def test_an_agent_that_uses_exactly_its_turns_finishes_its_work(scripted):
    state = await run(make_env(max_turns=3), scripted(adds))
    assert (state["stop_condition"], state["reward"]) == ("agent_completed", 1.0)


async def test_an_agent_that_ignores_the_end_is_given_a_moment_and_then_stopped(scripted):
    stubborn = """
import os, time, urllib.error, urllib.request
while True:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        b'{"messages": [{"role": "user", "content": "q"}]}', {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    try:
        urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        print(error.code, flush=True)
    time.sleep(0.02)
"""
    env = make_env("python3 /work/stubborn.py", files={"/work/stubborn.py": stubborn}, max_turns=1, wrap_up_seconds=1.5)
    state = await run(env, scripted("yes"))
    assert (state["stop_condition"], state["error"]) == ("max_turns_reached", None)
    assert "403" in state["agent_stdout"]
    assert len(state["trajectory"]) == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo oh no >&2; exit 3", "exit code 3 before any model call.*oh no"),
        ("no-such-program", "exit code 127 before any model call"),
        ("kill -9 $$", "exit code 137"),
        ("python3 /work/agent.py && exit 4", "exit code 4 after 3 model calls"),
    ],
)
async def test_an_agent_that_fails_is_an_error_of_its_rollout_and_no_reward(scripted, command, words):
    state = await run(make_env(command), scripted(adds))
    assert isinstance(state["error"], AgentError)
    assert isinstance(state["error"], vf.InfraError)
    assert state["reward"] is None
    with pytest.raises(AgentError, match="(?s)" + words):
        raise state["error"]


async def test_an_agent_that_hangs_is_stopped_in_time_and_scored_by_what_it_left(scripted):
    env = make_env("echo started; python3 /work/agent.py >/dev/null; sleep 1000", timeout_seconds=2.0)
    state = await run(env, scripted(adds))
    assert (state["stop_condition"], state["timed_out"], state["error"]) == ("timeout_reached", True, None)
    assert state["metrics"]["agent_timeout"] == 1.0
    assert state["agent_stdout"] == "started\n"
    assert state["reward"] == 1.0


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("echo -n 5 > /work/answer.txt", {}, r"agent_completed\) without one answer of the model"),
        ("echo -n 5 > /work/answer.txt; sleep 100", {"timeout_seconds": 3.0}, r"timeout_reached\) without one answer"),
        ("python3 /work/agent.py; echo -n 5 > /work/answer.txt", {"model": "full"}, "does not fit the model's context"),
    ],
)
async def test_what_a_program_does_without_the_model_earns_the_model_nothing(scripted, command, options, words):
    said = vf.OverlongPromptError("9 > 8") if options.pop("model", None) == "full" else "yes"
    state = await run(make_env(command, **options), scripted(lambda _: said))
    assert state["artifacts"] == {"/work/answer.txt": "5"}
    assert state["reward"] is None
    assert re.search(words, str(state["error"]))
    assert state["agent_calls"]["answered"] == 0


async def test_an_agent_that_floods_its_output_is_cut_and_not_kept_in_memory(scripted):
    state = await run(make_env("python3 /work/agent.py; head -c 30000000 /dev/zero | tr '\\0' x"), scripted("yes"))
    assert state["error"] is None
    assert len(state["agent_stdout"]) < 3 << 20


async def test_a_model_that_fails_is_the_providers_error_and_not_the_agents(scripted):
    state = await run(make_env(), scripted(lambda _: vf.ModelError("it is down")))
    assert type(state["error"]) is vf.ModelError
    assert (state["agent_calls"]["answered"], state["agent_calls"]["refused"]) == (0, 1)
    assert "it is down" in state["agent_stderr"]


async def test_a_context_that_is_full_ends_as_such(scripted):
    state = await run(make_env(), scripted(lambda p: vf.OverlongPromptError("9 > 8") if len(p) > 1 else adds(p)))
    assert (state["stop_condition"], state["is_truncated"], state["error"]) == ("prompt_too_long", True, None)


async def test_the_agent_reaches_the_proxy_and_nothing_else(scripted):
    probe = """
import os, socket, urllib.request
names = sorted(name for name in os.environ if "KEY" in name or "URL" in name)
print(names, os.environ["OPENAI_MODEL"], os.environ["MINE"])
try:
    socket.create_connection(("1.1.1.1", 80), 2)
    print("reached the world")
except OSError as error:
    print("no route:", error.errno)
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models", headers={"Authorization": "Bearer wrong"})
try:
    urllib.request.urlopen(request)
except urllib.error.HTTPError as error:
    print(error.code)
"""
    env = make_env(
        "python3 /work/probe.py",
        files={"/work/probe.py": probe},
        environment_vars={"MINE": "1", "OPENAI_MODEL": "other", "OPENAI_API_KEY": "leaked"},
    )
    state = await run(env, scripted("yes"))
    lines = state["agent_stdout"].splitlines()
    assert lines[0] == "['ANTHROPIC_API_KEY', 'ANTHROPIC_BASE_URL', 'OPENAI_API_KEY', 'OPENAI_BASE_URL'] policy 1"
    assert lines[1].startswith("no route")
    assert lines[2] == "401"


def check_nothing_is_left(env, sandboxes):
    """No machine, no door, no open secret."""
    (proxy,) = env._proxies.values()
    assert not env._agents
    assert not env.active_sandboxes
    assert not proxy.server._listeners
    assert len(proxy.server._sessions) == 0
    assert sandboxes
    assert not set(sandboxes) & set(shared_machines().boxes)


async def test_rollouts_of_a_group_run_side_by_side_and_leave_nothing_behind(scripted):
    env = make_env()
    states = await env.run_group([env.get_dataset()[0]] * 6, scripted(adds), "policy")
    assert [state["reward"] for state in states] == [1.0] * 6
    assert len({state["sandbox_id"] for state in states}) == 6
    check_nothing_is_left(env, [state["sandbox_id"] for state in states])
    await env.teardown()


async def test_a_cancelled_rollout_leaves_nothing_behind(scripted):
    env = make_env("sleep 100")
    rollout = asyncio.create_task(env.run_rollout(env.get_dataset()[0], scripted("yes"), "policy"))
    async with asyncio.timeout(100):
        while not any(agent.job for agent in env._agents.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    sandboxes = list(env.active_sandboxes)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    check_nothing_is_left(env, sandboxes)
    await env.teardown()


async def test_hooks_of_subclasses_see_the_sandbox_before_during_and_after(scripted):
    class Mine(CliAgentEnv):
        async def build_env_vars(self, state):
            return {**await super().build_env_vars(state), "HINT": "from the host", "OPENAI_API_KEY": "replaced"}

        async def post_sandbox_setup(self, state):
            await self.machine(state).upload("/data/number", b"41")

        async def normalize_response(self, response):
            response.message["content"] = (response.message.content or "").upper()
            return response

        async def post_rollout(self, state):
            await super().post_rollout(state)
            result = await self.machine(state).exec("cat /work/seen /data/number")
            state["seen"] = result.stdout

    command = 'echo "$HINT" > /work/seen; python3 /work/agent.py'
    env = Mine(
        command,
        dataset=[{"question": "q"}],
        rubric=vf.Rubric([lambda state: float("41" in state["seen"])]),
        files={"/work/agent.py": AGENT.read_bytes()},
    )
    state = await run(env, scripted("quiet"))
    assert state["error"] is None, state["agent_stderr"]
    assert state["seen"] == "from the host\n41"
    assert state["completion"][0]["content"] == "QUIET"
    assert state["reward"] == 1.0


async def test_hooks_written_for_the_hosted_sandbox_reach_it_by_its_id(scripted):
    class Older(CliAgentEnv):
        async def post_sandbox_setup(self, state):
            await self.upload_content(state["sandbox_id"], "41", "/data/number")
            said = await self.sandbox_client.execute_command(state["sandbox_id"], "echo $OPENAI_BASE_URL $OPENAI_MODEL")
            state["told"] = said.stdout

        async def post_rollout(self, state):
            state["seen"] = await self.read_file(state["sandbox_id"], "/work/seen")

    env = Older(
        "cat /data/number > seen; python3 agent.py",
        dataset=[{"question": "q"}],
        rubric=vf.Rubric([lambda state: float(state["seen"])]),
        files={"/work/agent.py": AGENT.read_bytes()},
    )
    state = await run(env, scripted("yes"))
    assert (state["reward"], state["error"]) == (41.0, None)
    assert state["told"] == "http://127.0.0.1:8765/v1 policy\n"


async def test_an_agent_built_on_an_sdk_runs_where_its_packages_are_shown(scripted):
    agent = """
import anthropic, openai
question = [{"role": "user", "content": open("/task/instruction.md").read()}]
first = openai.OpenAI().chat.completions.create(model="m", messages=question).choices[0].message.content
with anthropic.Anthropic().messages.stream(model="m", max_tokens=9, messages=question) as stream:
    second = "".join(stream.text_stream)
open("/work/answer.txt", "w").write(first + second)
"""
    env = make_env(
        "python3 /work/sdk.py",
        files={"/work/sdk.py": agent},
        python_packages=["openai", "anthropic"],
        memory_gb=1,
        max_turns=2,
    )
    state = await run(env, scripted("5"))
    assert state["error"] is None, state["agent_stderr"]
    assert state["artifacts"] == {"/work/answer.txt": "55"}
    assert [step["extras"]["dialect"] for step in state["trajectory"]] == ["chat", "messages"]


async def test_a_hook_that_raises_is_an_error_of_the_rollout(scripted):
    class Broken(CliAgentEnv):
        async def post_rollout(self, state):
            raise ValueError("no file")

    env = Broken("true", dataset=[{"question": "q"}], rubric=vf.Rubric([lambda: 1.0]))
    state = await run(env, scripted("yes"))
    assert "no file" in str(state["error"])
    assert state["reward"] is None


async def test_a_sandbox_kept_for_scoring_is_there_for_the_reward_and_gone_afterwards(scripted):
    seen = []

    async def reads_the_sandbox(state):
        machine = env.machine(state)
        seen.append(machine)
        return float((await machine.exec("cat /work/answer.txt")).stdout == "5")

    env = make_env(keep_sandbox_for_scoring=True, rubric=vf.Rubric([reads_the_sandbox]))
    state = await env.run_rollout(env.get_dataset()[0], scripted(adds), "policy")
    assert (state["reward"], state["error"]) == (1.0, None)
    assert not seen[0].is_alive
    assert not env._agents
    await env.teardown()


async def test_each_evaluation_in_a_loop_of_its_own_gets_a_proxy_of_its_own(scripted):
    env = make_env()
    for _ in range(2):
        results = await asyncio.to_thread(env.evaluate_sync, scripted(adds), "policy", num_examples=1)
        assert results.reward == [1.0]
    assert len(env._proxies) == 1, "a loop that was closed is forgotten"
    await env.teardown()


async def test_without_isolation_only_when_asked_by_name_and_in_a_directory_of_its_own(scripted):
    command = "cat $METTLE_TASK_DIR/instruction.md; pwd; sed -i s,/task/,task/, agent.py; sed -i s,/work/,, agent.py; python3 agent.py"
    env = make_env(command, sandbox_backend="unsafe")
    state = await run(env, scripted(adds))
    assert state["error"] is None, state["agent_stderr"]
    assert state["agent_stdout"].startswith("What is 1 + 2 + 2?/")
    assert "/mettle-sandbox-" in state["agent_stdout"]
    assert state["reward"] == 1.0


async def test_an_agent_anywhere_reaches_the_proxy_at_the_url_that_one_gives(scripted):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    env = make_env("echo $OPENAI_BASE_URL", interception_port=port, interception_url=url, sandbox_backend="unsafe")
    state = await run(env, scripted("yes"))
    assert state["agent_stdout"] == f"{url}/v1\n"
    probe = "import os, urllib.request as u; u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/models', headers={'x-api-key': os.environ['OPENAI_API_KEY']}))"
    env = make_env(["python3", "-c", probe], interception_port=port, interception_url=url, sandbox_backend="unsafe")
    state = await run(env, scripted("yes"))
    assert state["agent_exit_code"] == 0, state["agent_stderr"]


def test_settings_that_cannot_be_met_are_refused_at_once():
    with pytest.raises(UserError, match="gpu_count is 1"):
        make_env(gpu_count=1)
    with pytest.raises(UserError, match="agent_sampling"):
        make_env(agent_sampling="maybe")
