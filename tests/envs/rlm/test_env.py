"""Recursive language models: code in the sandbox, tools and sub-models through the bridge, the answer out of the code."""

from __future__ import annotations

import json
import os
import shutil

import pytest

import mettle.envs as vf
from mettle.envs.rlm.env import RLMEnv
from mettle.errors import UserError
from mettle.sandbox import SandboxConfig, probe


@pytest.fixture(autouse=True)
def isolated():
    if not probe(SandboxConfig()).is_at_least("ns"):
        pytest.skip("this host cannot isolate code")


def coded(*steps, language="bash"):
    """A root model that runs these steps of code; every other conversation is a sub-model's."""

    def say(prompt):
        if not any(f"call_{language}_repl" in str(message.get("content")) for message in prompt):
            last = prompt[-1]
            if last["role"] == "user" and "with the tool" in last["content"]:
                return {"tool_calls": [{"id": "s", "name": "lookup", "arguments": json.dumps({"key": "b"})}]}
            return f"sub:{last['content']}"
        turn = sum(message["role"] == "assistant" for message in prompt)
        if turn >= len(steps):
            return "I give up"
        arguments = json.dumps({"code": steps[turn]})
        return {"tool_calls": [{"id": f"c{turn}", "name": f"call_{language}_repl", "arguments": arguments}]}

    return say


def lookup(key: str) -> str:
    """Look a key up."""
    return {"b": "found"}[key]


async def add(first: int, second: int = 10) -> int:
    """Add two numbers."""
    return first + second


def made(**options) -> RLMEnv:
    async def exact(state, answer):
        return float(state["final_answer"] == answer)

    info = {"context": options.pop("context", "the secret is 42\n")}
    rows = [{"question": "What is the secret?", "answer": "42", "info": info}]
    return RLMEnv(dataset=rows, rubric=vf.Rubric(funcs=[exact]), root_tools=[add], sub_tools=[lookup], **options)


async def rolled_out(env, client):
    state = await env.run_rollout(env.get_dataset()[0], client, "m", {})
    await env.teardown()
    assert state["error"] is None, state["error"]
    return state


def told(state):
    return [message["content"] for message in state["completion"] if message["role"] == "tool"]


async def test_a_python_reads_the_context_calls_tools_asks_sub_models_and_answers(scripted):
    client = scripted(
        coded(
            "text = open('context.txt').read(); x = add(1, second=2); print(x)",
            "print(llm_batch(['one', 'use it with the tool']))",
            "answer['content'] = text.split()[-1]; answer['ready'] = True",
            language="python",
        )
    )
    state = await rolled_out(made(repl_language="python"), client)
    assert state["final_answer"] == "42"
    assert state["reward"] == 1.0
    assert told(state)[0] == "3"
    assert told(state)[1] == "['sub:one', 'sub:found']"
    assert len(state["trajectory"]) == 3
    metrics = state["metrics"]
    assert (metrics["sub_llm_call_count"], metrics["sub_llm_total_turns"], metrics["sub_llm_total_tool_calls"]) == (
        2,
        3,
        1,
    )
    assert (metrics["repl_call_count"], metrics["root_tool_call_count"], metrics["main_rlm_turns"]) == (3, 1, 3)
    assert "call_python_repl" in state["prompt"][0]["content"]
    assert state["raw_prompt"][0]["content"] == "What is the secret?"
    assert not os.path.exists(state["rlm_rollout_dir"])  # noqa: ASYNC240


async def test_a_shell_keeps_its_directory_and_variables_and_has_tools_as_commands(scripted):
    client = scripted(
        coded(
            "export SEEN=$(cat context.json); mkdir sub; cd sub",
            'pwd; echo $SEEN; add 4; add --json \'{"first": 1, "second": 1}\'; add nonsense',
            "llm_batch 'one' 'two'; echo three | llm_batch",
            "RLM_CONTENT=42 RLM_READY=1; exit 3",
        )
    )
    state = await rolled_out(made(context={"a": [1]}), client)
    assert state["reward"] == 1.0
    assert told(state)[0] == "(no output)"
    lines = told(state)[1].splitlines()
    assert lines[:4] == ["/work/sub", '{"a": [1]}', "14", "2"]
    assert "add: TypeError" in told(state)[1]
    assert told(state)[2].splitlines() == ['["sub:one", "sub:two"]', "sub:three"]


async def test_files_that_the_model_leaves_are_read_where_rewards_read_them(scripted, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    env = made(retain_filesystem_after_rollout=True)
    row = dict(env.get_dataset()[0])
    row["info"] = {"context_dir": str(tmp_path)}
    client = scripted(coded("rm a.txt; echo new > c.txt; ln -s /etc/passwd link; RLM_CONTENT=x; RLM_READY=1"))
    state = await env.run_rollout(row, client, "m", {})
    await env.teardown()
    assert state["error"] is None, state["error"]
    assert sorted(os.listdir(state["rlm_fs_root"])) == ["b.txt", "c.txt"]
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]
    shutil.rmtree(state["rlm_rollout_dir"])  # Rewards that ask for it to be kept remove it.


async def test_without_an_answer_that_is_ready_the_best_there_is_counts(scripted):
    state = await rolled_out(
        made(repl_language="python"), scripted(coded("answer['content'] = '42'", language="python"))
    )
    assert (state["reward"], state["stop_condition"]) == (1.0, "no_tools_called")
    state = await rolled_out(made(), scripted(coded("echo")))
    assert state["final_answer"] == "I give up"


async def test_a_python_that_ends_or_spoils_its_names_goes_on(scripted):
    client = scripted(
        coded(
            "import os; os._exit(1)",
            "answer = 5",
            "answer = {'content': add(41, 1), 'ready': 1}",
            language="python",
        )
    )
    state = await rolled_out(made(repl_language="python"), client)
    assert "Python ended" in told(state)[0]
    assert state["reward"] == 1.0


async def test_a_failing_sub_model_is_the_rollouts_error_and_no_word_of_the_model(scripted):
    steps = coded("llm_batch 'one'; RLM_READY=1")

    def say(prompt):
        return vf.ModelError("down") if "call_bash_repl" not in str(prompt[0]["content"]) else steps(prompt)

    env = made()
    state = await env.run_rollout(env.get_dataset()[0], scripted(say), "m", {})
    await env.teardown()
    assert "down" in str(state["error"])
    assert state["reward"] is None


async def test_long_output_is_cut_and_slow_code_is_told_or_ends_the_rollout(scripted):
    client = scripted(coded("seq 1 100000", "sleep 60"))
    state = await rolled_out(made(max_output_length=100, code_execution_timeout=1), client)
    assert "characters not shown" in told(state)[0]
    assert told(state)[1].startswith("Error: Command timed out after 1s")
    env = made(code_execution_timeout=1, abort_on_code_timeout=True)
    state = await env.run_rollout(env.get_dataset()[0], scripted(coded("sleep 60")), "m", {})
    await env.teardown()
    assert "took more than 1 s" in str(state["error"])


async def test_authors_reach_the_rollout_from_their_tools_and_the_sandbox_by_hooks(scripted):
    class Mine(RLMEnv):
        def __init__(self, **options):
            super().__init__(root_tools=[self.where], **options)

        async def where(self) -> str:
            """Where this runs."""
            return self._root_tool_context_var.get()["state"]["sandbox_id"]

        async def on_sandbox_ready(self, state, sandbox_id):
            await self._executor._execute_sandbox_command(sandbox_id, "echo ready > /work/mine", timeout=5)

        async def _run_sub_llm(self, state, client, model, messages):
            return {**await super()._run_sub_llm(state, client, model, messages), "final_content": model}

    env = Mine(
        dataset=[{"question": "q", "answer": ""}],
        max_iterations=3,
        sub_tool_max_turns=2,
        docker_image="python:3.12-slim",
        sub_model="small",
    )
    assert (env.max_turns, env.sub_llm_max_turns, env.sandbox_docker_image) == (3, 2, "python:3.12-slim")
    state = await rolled_out(env, scripted(coded("cat mine; where; llm_batch hi; RLM_READY=1")))
    assert told(state)[0].splitlines() == ["ready", state["sandbox_id"], "small"]


def test_what_is_not_offered_is_refused():
    with pytest.raises(UserError, match="include_sub_llm_in_trajectory of RLMEnv is not offered here"):
        made(include_sub_llm_in_trajectory=True)
    with pytest.raises(UserError, match="repl_language is 'ruby'"):
        made(repl_language="ruby")
