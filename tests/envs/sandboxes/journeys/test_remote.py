"""Environments whose sandboxes are those of a service: nothing else about them changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mettle.envs as vf
from mettle.envs.sandboxes import configure
from mettle.sandbox import SandboxConfig, probe
from mettle.sandbox.service.local import _answers

AGENT = Path(__file__).parents[2] / "agents" / "tool_agent.py"
ROWS = [{"question": "q", "answer": "5"}]

pytestmark = pytest.mark.skipif(
    not probe(SandboxConfig()).is_at_least("ns"), reason="this host cannot isolate code; environments refuse it, too"
)


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxConfig]:
    path = tmp_path_factory.mktemp("service") / "socket"
    command = [sys.executable, "-m", "mettle.sandbox.service", json.dumps({"unix": str(path), "grace_s": 1.0})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert _answers(path)
        config = SandboxConfig(backend="remote", urls=(f"unix:{path}",))
        configure(sandbox=config)
        yield config
        configure(sandbox=None)
        process.terminate()


async def roll(env: vf.Environment, scripted: Any, *said: Any) -> Any:
    turns = iter([*said, "done"])
    try:
        return await env.run_rollout(env.get_dataset()[0], scripted(lambda _: next(turns)), "m")
    finally:
        await env.teardown()


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"id": "c", "name": tool, "arguments": json.dumps(arguments)}]}


def told(state: Any) -> list[str]:
    return [message["content"] for message in state["completion"] if message["role"] == "tool"]


@pytest.mark.usefixtures("remote")
async def test_a_shell_works_there(scripted: Any) -> None:
    state = await roll(vf.SandboxEnv(dataset=ROWS), scripted, call("bash", command="echo $((2+3)) > f; cat f"))
    assert state["error"] is None
    assert told(state) == ["5"]


@pytest.mark.usefixtures("remote")
async def test_a_python_keeps_its_variables_there(scripted: Any) -> None:
    env = vf.PythonEnv(dataset=ROWS, pip_install_packages="")
    state = await roll(env, scripted, call("python", code="x = 5"), call("python", code="x * 2"))
    assert state["error"] is None
    assert "10" in told(state)[1]


async def test_code_is_judged_there(remote: SandboxConfig) -> None:
    rubric = vf.CodeRubric(sandbox=remote)
    rows = [{"question": "add", "info": {"tests": [{"stdin": "2 3", "expected": "5"}]}}]
    env = vf.SingleTurnEnv(dataset=rows, rubric=rubric, parser=rubric.parser)
    env.demonstrate = lambda messages, row: "```python\nprint(sum(map(int, input().split())))\n```"
    try:
        state = await env.run_rollout(env.get_dataset()[0], vf.Demonstrator(env), "m")
    finally:
        await env.teardown()
    assert (state["reward"], state["judged"]["isolation"]) == (1.0, "ns")


@pytest.mark.usefixtures("remote")
async def test_an_agent_there_reaches_the_proxy_here(scripted: Any) -> None:
    def adds(prompt: Any) -> Any:
        results = [message["content"] for message in prompt if message["role"] == "tool"]
        if len(results) < 2:
            arguments = {"a": int(results[-1]) if results else 1, "b": 2}
            made = {"id": f"c{len(results)}", "name": "add", "arguments": json.dumps(arguments)}
            return {"content": None, "tool_calls": [made], "finish_reason": "tool_calls"}
        return results[-1]

    env = vf.CliAgentEnv(
        "python3 /work/agent.py",
        dataset=[{"question": "What is 1 + 2 + 2?", "answer": "5"}],
        rubric=vf.Rubric([lambda state, answer: float(state["artifacts"]["/work/answer.txt"] == answer)]),
        files={"/work/agent.py": AGENT.read_bytes()},
        artifacts=["/work/answer.txt"],
        memory_gb=0.25,
        disk_size_gb=0.02,
        poll_interval=0.2,
    )
    try:
        state = await env.run_rollout(env.get_dataset()[0], scripted(adds), "policy")
    finally:
        await env.teardown()
    assert state["error"] is None, state
    assert state["reward"] == 1.0
