"""The model's shell and the model's Python: what it is told, what is measured, what is cleaned up."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

import mettle.envs as vf
from mettle.envs.sandboxes import (
    AsyncSandboxClient,
    CreateSandboxRequest,
    configure,
)
from mettle.envs.sandboxes.boxes import _warned
from mettle.errors import SandboxError
from mettle.sandbox import SandboxConfig, probe

ROWS = [{"question": "q", "answer": "5"}]

pytestmark = pytest.mark.skipif(
    not probe(SandboxConfig()).is_at_least("ns"), reason="this host cannot isolate code; environments refuse it, too"
)


def calls(tool: str, *arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "tool_calls": [
            {"id": f"c{number}", "name": tool, "arguments": json.dumps(one)} for number, one in enumerate(arguments)
        ]
    }


async def converse(env: vf.Environment, scripted: Any, *said: Any) -> tuple[Any, list[str]]:
    turns = iter([*said, "done"])
    state = await env.run_rollout(env.get_dataset()[0], scripted(lambda _: next(turns)), "m")
    return state, [message["content"] for message in state["completion"] or [] if message["role"] == "tool"]


async def shell(scripted: Any, *commands: str, **arguments: Any) -> tuple[Any, list[str]]:
    env = vf.SandboxEnv(dataset=ROWS, **arguments)
    try:
        return await converse(env, scripted, *(calls("bash", {"command": command}) for command in commands))
    finally:
        await env.teardown()


async def python(scripted: Any, *codes: str, **arguments: Any) -> tuple[Any, list[str]]:
    env = vf.PythonEnv(dataset=ROWS, pip_install_packages="", **arguments)
    try:
        return await converse(env, scripted, *(calls("python", {"code": code}) for code in codes))
    finally:
        await env.teardown()


async def num_running(label: str) -> int:
    return (await AsyncSandboxClient().list(labels=[label], status="RUNNING")).total


async def test_a_shell_keeps_its_files_and_says_what_happened(scripted):
    state, said = await shell(scripted, "echo 1 > a; echo err >&2; echo out", "cat a", "true", "exit 3")
    assert said == ["out\nstderr:\nerr", "1", "(no output)", "(no output)"]
    assert state["error"] is None
    assert state["metrics"]["bash_calls"] == 4
    assert 0 < state["metrics"]["sandbox_command_execution_time"] < 5
    assert state["metrics"]["sandbox_ready_wait_time"] > 0
    assert state["sandbox_isolation"] == "ns"


async def test_the_model_sees_the_command_and_nothing_else(scripted):
    env = vf.SandboxEnv(dataset=ROWS)
    [tool] = env.tool_defs
    assert tool["name"] == "bash"
    assert list(tool["parameters"]["properties"]) == ["command"]
    [tool] = vf.PythonEnv(dataset=ROWS, pip_install_packages="").tool_defs
    assert (tool["name"], list(tool["parameters"]["properties"])) == ("python", ["code"])


async def test_a_command_that_takes_too_long_is_told_to_the_model(scripted):
    state, said = await shell(scripted, "sleep 60", "echo on", timeout_per_command_seconds=1)
    assert said == ["Error: Command timed out after 1s", "on"]
    assert state["error"] is None
    assert state["sandbox_state"]["command_execution_times"][0] == 1.0


async def test_variables_and_a_directory_reach_the_shell(scripted):
    class Elsewhere(vf.SandboxEnv):
        async def setup_state(self, state, **kwargs):
            state = await super().setup_state(state, **kwargs)
            await self.sandbox_client.execute_command(state["sandbox_id"], "mkdir -p /app")
            state["working_dir"] = "/app"
            return state

    env = Elsewhere(dataset=ROWS, environment_vars={"COLOUR": "blue"})
    _, said = await converse(env, scripted, calls("bash", {"command": "pwd; echo $COLOUR"}))
    assert said == ["/app\nblue"]
    await env.teardown()


async def test_a_sandbox_is_looked_at_by_post_rollout_and_then_deleted(scripted):
    class Graded(vf.SandboxEnv):
        async def post_rollout(self, state):
            state["found"] = await self.read_file(state["sandbox_id"], "/work/answer")
            raise ValueError("a grader that fails")

    env = Graded(dataset=ROWS, labels=["graded"])
    state, _ = await converse(env, scripted, calls("bash", {"command": "echo 42 > answer"}))
    assert state["found"] == "42\n"
    assert "a grader that fails" in state["cleanup_error"]
    assert await num_running("graded") == 0
    assert env.active_sandboxes == set()


async def test_a_request_depends_on_the_row(scripted):
    class Sized(vf.SandboxEnv):
        def get_sandbox_request(self, state):
            return super().get_sandbox_request(state).model_copy(update={"disk_size_gb": int(state["answer"]) / 1024})

    env = Sized(dataset=ROWS)
    _, said = await converse(env, scripted, calls("bash", {"command": "df -m --output=size /work | tail -1"}))
    assert said == ["5"]
    assert env.sandbox_request.disk_size_gb == 5


async def test_a_sandbox_that_is_gone_ends_the_rollout_as_a_sandbox_error(scripted):
    env = vf.SandboxEnv(dataset=ROWS)

    turns = iter([calls("bash", {"command": "true"}), calls("bash", {"command": "true"})])

    class Saboteur(scripted):
        async def get_response(self, *args, **kwargs):
            response = await super().get_response(*args, **kwargs)
            if len(self.calls) == 2:
                await env.teardown_sandboxes()
            return response

    state = await env.run_rollout(ROWS[0] | {"prompt": []}, Saboteur(lambda _: next(turns)), "m")
    assert isinstance(state["error"].__cause__ or state["error"], SandboxError)
    assert state["reward"] is None


async def test_many_rollouts_have_many_sandboxes_and_leave_none(scripted):
    env = vf.SandboxEnv(dataset=ROWS, labels=["many"])

    def say(prompt: Any) -> Any:
        return "done" if prompt[-1]["role"] == "tool" else calls("bash", {"command": "echo x >> f; wc -l < f"})

    states = await asyncio.gather(*(env.run_rollout(env.get_dataset()[0], scripted(say), "m") for _ in range(20)))
    assert [state["completion"][1]["content"] for state in states] == ["1"] * 20
    assert await num_running("many") == 0


async def test_what_cannot_be_had_is_said_once(scripted, caplog):
    _warned.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await shell(scripted, "true", gpu_count=1)
    assert sum("1 GPU" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("kind", [vf.SandboxEnv, vf.PythonEnv])
async def test_an_image_that_the_backend_does_not_have_is_refused_and_named(scripted, kind):
    env = kind(dataset=ROWS, docker_image="pytorch/pytorch:2.0")
    state, _ = await converse(env, scripted)
    await env.teardown()
    assert "'pytorch/pytorch:2.0'" in str(state["error"])
    assert "sandbox.host_images" in str(state["error"])
    assert "trying again" not in str(state["error"])


async def test_an_image_that_this_host_stands_for_is_taken(scripted):
    _, said = await shell(scripted, "echo here", docker_image="python:3.12-slim")
    assert said == ["here"]
    configure(sandbox=SandboxConfig(host_images=("pytorch/*",)))
    try:
        _, said = await shell(scripted, "echo here", docker_image="pytorch/pytorch:2.0")
    finally:
        configure(sandbox=None)
    assert said == ["here"]


async def test_python_keeps_its_variables_and_shows_values(scripted):
    state, said = await python(
        scripted, "x = 20\ndef f(n):\n    return n + 1", "f(x)", "print('out'); import sys; print('err', file=sys.stderr); f(f(x))",
        "None", "import os; os.system('echo from a program')",
    )  # fmt: skip
    assert said == [
        "(no output)",
        "Out[2]: 21",
        "out\nstderr:\nerr\nOut[3]: 22",
        "(no output)",
        "from a program\nOut[5]: 0",
    ]
    assert state["python_state"]["execution_count"] == 5
    assert state["metrics"]["python_ready_wait_time"] > 0
    assert state["metrics"]["sandbox_command_execution_time"] > 0


async def test_python_shows_the_codes_own_traceback(scripted):
    _, said = await python(scripted, "def g():\n    return 1 / 0\ng()", "def broken(:", "raise SystemExit(3)", "1")
    assert said[0].splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "<input 1>", line 3, in <module>',
        "    g()",
    ]
    assert said[0].endswith("ZeroDivisionError: division by zero")
    assert "SyntaxError" in said[1]
    assert said[2] == "SystemExit: 3"
    assert said[3] == "Out[4]: 1"


async def test_python_that_takes_too_long_is_interrupted_and_keeps_its_variables(scripted):
    _, said = await python(scripted, "kept = 7", "while True: pass", "kept", timeout_per_command_seconds=1)
    assert said[1].startswith("Error: Command timed out after 1s\nTraceback")
    assert said[1].endswith("KeyboardInterrupt")
    assert said[2] == "Out[3]: 7"


async def test_python_that_cannot_be_interrupted_starts_again(scripted):
    stubborn = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nlost = 1\ntime.sleep(60)"
    state, said = await python(scripted, stubborn, "'lost' in globals()", timeout_per_command_seconds=1)
    assert "could not be interrupted" in said[0]
    assert said[1] == "Out[1]: False"
    assert state["error"] is None


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import os; os.kill(os.getpid(), 9)",
        "import gc, socket\nfor s in [o for o in gc.get_objects() if isinstance(o, socket.socket)]: s.close()\n"
        "import os; os.closerange(3, 50)",
    ],
)
async def test_python_that_ends_itself_is_told_and_starts_again(scripted, code):
    state, said = await python(scripted, code, "1 + 1")
    assert said[0].startswith("Error: Python ended while it ran this")
    assert said[1] == "Out[1]: 2"
    assert state["error"] is None


async def test_a_flood_of_output_loses_its_middle(scripted):
    _, said = await python(scripted, "print('a' * 5_000_000)")
    assert len(said[0]) < 210_000
    assert "bytes left out" in said[0]


async def test_python_has_the_packages_it_was_given_and_says_what_is_missing(scripted, caplog):
    _warned.clear()
    env = vf.PythonEnv(dataset=ROWS, pip_install_packages="numpy>=1 no-such-package")
    with caplog.at_level(logging.WARNING):
        _, said = await converse(env, scripted, calls("python", {"code": "import numpy; int(numpy.arange(4).sum())"}))
    await env.teardown()
    assert said == ["Out[1]: 6"]
    assert any("no-such-package is not installed here" in record.getMessage() for record in caplog.records)


async def test_a_host_that_is_not_isolated_is_only_used_by_name(scripted):
    configure(sandbox=SandboxConfig(backend="unsafe"))
    try:
        state, said = await shell(scripted, "echo ran")
    finally:
        configure(sandbox=None)
    assert said == ["ran"]
    assert state["sandbox_isolation"] == "none"


async def test_one_client_serves_several_event_loops():
    client = AsyncSandboxClient()
    sandbox = await client.create(CreateSandboxRequest(name="shared"))
    run = lambda: asyncio.run(client.execute_command(sandbox.id, "echo from another loop"))  # noqa: E731
    assert (await asyncio.to_thread(run)).stdout == "from another loop\n"
    await client.delete(sandbox.id)
