"""OpenEnv servers: one in this process that can misbehave, and one that a project starts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web

import mettle.envs as vf
from mettle.errors import EnvironmentFault, InfraError, UserError

GUESS = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
SAY = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["text"],
}
CALL = {"type": "object", "properties": {"tool_name": {"type": "string"}, "arguments": {"type": "object"}}}


class Server:
    """The protocol, with `fault` at the first step; `capacity` episodes at a time."""

    def __init__(self, schema=GUESS, fault="", capacity=100):
        self.schema, self.fault, self.capacity = schema, fault, capacity
        self.num_open = self.most_open = self.num_closed = 0
        self.seeds: list[int] = []
        self.secrets: dict[int, int] = {}

    async def describe(self, request):
        return web.json_response({"action": self.schema})

    async def answer(self, request):
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        if self.num_open >= self.capacity:
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT or not await self.one(socket, json.loads(message.data)):
                    break
        finally:
            self.num_open -= 1
        return socket

    async def one(self, socket, asked):
        kind, data = asked["type"], asked.get("data", {})
        if kind == "close":
            self.num_closed += 1
            return False
        if kind == "reset":
            self.seeds.append(data["seed"])
            self.secrets[id(socket)] = random.Random(data["seed"]).randint(1, 9)
            await self.observe(socket, {"text": "guess"})
        elif kind == "mcp":
            assert data["method"] == "tools/list"
            tools = [{"name": "look", "description": "Look.", "inputSchema": {"type": "object", "properties": {}}}]
            await socket.send_json(
                {"type": "mcp", "data": {"jsonrpc": "2.0", "id": data["id"], "result": {"tools": tools}}}
            )
        elif self.fault:
            return await self.misbehave(socket)
        elif "tool_name" in data:
            await self.tool(socket, data)
        elif self.schema is SAY:
            await self.observe(socket, {"heard": data["text"]}, 0.5, True)
        elif not isinstance(data.get("number"), int):
            wrong = {
                "message": "Invalid message",
                "code": "VALIDATION_ERROR",
                "errors": [{"loc": ["number"], "msg": "no integer"}],
            }
            await socket.send_json({"type": "error", "data": wrong})
        else:
            is_right = data["number"] == self.secrets[id(socket)]
            await self.observe(socket, {"text": "right" if is_right else "wrong"}, float(is_right), is_right)
        return True

    async def tool(self, socket, data):
        if data["tool_name"] != "look":
            await self.observe(
                socket, {"tool_name": data["tool_name"], "result": None, "error": {"message": "unknown tool"}}
            )
        else:
            result = {"content": [{"type": "text", "text": f"seen {data['arguments']}"}]}
            await self.observe(socket, {"tool_name": "look", "result": result, "error": None}, 0.25)

    async def observe(self, socket, observation, reward=None, done=False):
        await socket.send_json(
            {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}
        )

    async def misbehave(self, socket):
        if self.fault == "garbage":
            await socket.send_str("<html>502</html>")
        elif self.fault == "other":
            await socket.send_json({"type": "weather", "data": {}})
        elif self.fault == "list":
            await socket.send_json([1, 2])
        elif self.fault == "raises":
            await socket.send_json(
                {"type": "error", "data": {"message": "ZeroDivisionError", "code": "EXECUTION_ERROR"}}
            )
        elif self.fault == "reward":
            await self.observe(socket, {}, "lots")
        elif self.fault == "hang":
            await asyncio.sleep(30)
        elif self.fault == "huge":
            await self.observe(socket, {"text": "x" * 5_000_000}, 1.0, True)
        return self.fault not in ("dies",)


@pytest.fixture
async def serve():
    runners = []

    async def start(**options):
        server = Server(**options)
        app = web.Application()
        app.router.add_get("/ws", server.answer)
        app.router.add_get("/schema", server.describe)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        return server, f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def counting(prompt):
    said = sum(message["role"] == "assistant" for message in prompt)
    return json.dumps({"number": said + 1})


async def play(env, scripted, say=counting, row=0):
    client = scripted(say)
    return await env.run_rollout(env.get_dataset()[row], client, "m"), client


async def test_an_episode_is_played_with_the_rows_seed(scripted, serve):
    server, url = await serve()
    env = vf.OpenEnvEnv(
        base_url=url, seed=5, max_turns=12, num_train_examples=3, num_eval_examples=2, system_prompt="Play."
    )
    assert [row["info"]["seed"] for row in env.get_eval_dataset()] == [8, 9]
    for row in range(3):
        state, client = await play(env, scripted, row=row)
        secret = random.Random(5 + row).randint(1, 9)
        assert state["error"] is None
        assert (state["reward"], len(client.calls), state["stop_condition"]) == (1.0, secret, "is_done")
        assert state["completion"][-1]["content"] == '{"text": "right"}'
        assert [message["role"] for message in state["prompt"]] == ["system", "user"]
        assert '"number"' in state["prompt"][1]["content"], "the model is told what an action looks like"
    assert server.seeds == [5, 6, 7]
    assert server.num_closed == 3


async def test_the_renderer_gets_what_it_names(scripted, serve):
    _, url = await serve()
    contexts = []

    def render(observation, context, seed):
        contexts.append((context, seed))
        return [{"role": "user", "content": f"{context}: {observation['text']}"}]

    state, _ = await play(vf.OpenEnvEnv(base_url=url, prompt_renderer=render, max_turns=1), scripted)
    assert state["prompt"] == [{"role": "user", "content": "reset: guess"}]
    assert contexts == [("reset", 0), ("step", None)], "the action that the limit allows is carried out"
    for broken in (
        lambda observation: [],
        lambda observation: [{"role": "user", "content": None}],
        lambda observation: 1 / 0,
    ):
        state, _ = await play(vf.OpenEnvEnv(base_url=url, prompt_renderer=broken), scripted)
        assert isinstance(state["error"], EnvironmentFault)
        assert "prompt_renderer" in str(state["error"])


async def test_an_action_that_does_not_fit_is_told_to_the_model(scripted, serve):
    _, url = await serve()
    said = iter(["what?", '{"number": "x"}', '```json\n{"number": 99}\n```'])
    state, _ = await play(vf.OpenEnvEnv(base_url=url, max_turns=3), scripted, lambda _: next(said))
    told = [message["content"] for message in state["completion"] if message["role"] == "user"]
    assert told == [
        "Error: an action is one JSON object that fits the schema",
        "Error: number: no integer",
        '{"text": "wrong"}',
    ]
    assert [step["reward"] for step in state["trajectory"]] == [0.0, 0.0, 0.0]


async def test_plain_text_is_the_action_where_there_is_one_text_field(scripted, serve):
    _, url = await serve(schema=SAY)
    state, _ = await play(vf.OpenEnvEnv(base_url=url), scripted, "hello there")
    assert (state["completion"][-1]["content"], state["reward"]) == ('{"heard": "hello there"}', 0.5)


async def test_tools_of_a_server_are_offered_and_called(scripted, serve):
    _, url = await serve(schema=CALL)
    calls = [("look", '{"at": "sky"}'), ("fly", "{}"), ("look", "[1]"), ("look", "{")]
    turns = iter(
        [{"tool_calls": [{"id": f"c{i}", "name": n, "arguments": a} for i, (n, a) in enumerate(calls)]}, "bye"]
    )
    state, client = await play(vf.OpenEnvEnv(base_url=url), scripted, lambda _: next(turns))
    assert state["error"] is None
    answers = [message["content"] for message in state["completion"] if message["role"] == "tool"]
    assert answers[:2] == ["seen {'at': 'sky'}", "Error: unknown tool"]
    assert answers[2] == "Error: the arguments of look are no JSON object"
    assert answers[3].startswith("Error: Expecting property name")
    assert [tool["name"] for tool in client.calls[0]["tools"]] == ["look"]
    assert (state["reward"], state["stop_condition"]) == (0.25, "is_done")


async def test_rollouts_wait_for_a_server_that_is_full(scripted, serve):
    server, url = await serve(capacity=2)
    env = vf.OpenEnvEnv(base_url=url, max_turns=12)
    states = await asyncio.gather(*(play(env, scripted, row=row) for row in range(8)))
    assert [state["reward"] for state, _ in states] == [1.0] * 8
    assert server.most_open == 2
    _, url = await serve(capacity=0)
    state, _ = await play(vf.OpenEnvEnv(base_url=url, capacity_wait_s=0.0), scripted)
    assert isinstance(state["error"], InfraError)
    assert "the OpenEnv server is full" in str(state["error"])


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("garbage", InfraError, "answered a step with no JSON: '<html>502</html>'"),
        ("other", InfraError, "answered a step with"),
        ("list", InfraError, "answered a step with"),
        ("raises", EnvironmentFault, r"the OpenEnv environment failed in step \(EXECUTION_ERROR\): ZeroDivisionError"),
        ("reward", EnvironmentFault, "the reward 'lots', which is no number"),
        ("dies", InfraError, "ended the connection during a step"),
        ("hang", InfraError, "said nothing to a step for 0.3 s"),
    ],
)
async def test_what_goes_wrong_on_the_server_is_the_rollouts_error(scripted, serve, fault, kind, says):
    server, url = await serve(fault=fault)
    env = vf.OpenEnvEnv(base_url=url, message_timeout_s=0.3)
    state, _ = await play(env, scripted)
    assert state["reward"] is None
    with pytest.raises(kind, match=says):
        raise state["error"]
    server.fault = ""
    state, _ = await play(env, scripted)
    assert state["error"] is None


async def test_a_large_observation_passes(scripted, serve):
    _, url = await serve(fault="huge")
    state, _ = await play(vf.OpenEnvEnv(base_url=url), scripted)
    assert (state["reward"], len(state["completion"][-1]["content"]) > 5_000_000) == (1.0, True)


async def test_no_server_at_all_is_the_rollouts_error(scripted):
    state, _ = await play(vf.OpenEnvEnv(base_url="http://127.0.0.1:9"), scripted)
    assert isinstance(state["error"], InfraError)
    assert "does not tell its schema" in str(state["error"])


APP = """
    import json
    from fastapi import FastAPI, WebSocket

    app = FastAPI()

    @app.get("/health")
    def health():
        return {"status": "healthy"}

    @app.get("/schema")
    def schema():
        return {"action": {"type": "object", "properties": {"text": {"type": "string"}}}}

    @app.websocket("/ws")
    async def episode(socket: WebSocket):
        import os
        await socket.accept()
        while (asked := json.loads(await socket.receive_text()))["type"] != "close":
            said = {"pid": os.getpid(), "data": asked["data"]}
            done = asked["type"] == "step"
            await socket.send_text(json.dumps({"type": "observation", "data": {"observation": said, "reward": float(done), "done": done}}))
        await socket.close()
"""


@pytest.fixture
def project(tmp_path):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    pytest.importorskip("websockets")
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "main.py").write_text(textwrap.dedent(APP))
    (tmp_path / "openenv.yaml").write_text("# a comment\nname: echo\napp: server.main:app\nport: 8000\n")
    return tmp_path


def pid_of(state):
    return json.loads(state["completion"][-1]["content"])["pid"]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_projects_server_is_started_once_and_stopped(scripted, project):
    env = vf.OpenEnvEnv(project, run_project="process")
    states = await asyncio.gather(*(play(env, scripted, "hi", row=row) for row in range(3)))
    assert [state["error"] for state, _ in states] == [None] * 3
    pids = {pid_of(state) for state, _ in states}
    assert len(pids) == 1
    pid = pids.pop()
    os.kill(pid, signal.SIGKILL)
    for _ in range(200):
        if (
            not env._server.is_running
        ):  # a process whose threads still end cannot be waited for, though it shows as dead
            break
        await asyncio.sleep(0.01)
    state, _ = await play(env, scripted, "hi")
    assert state["error"] is None, "a server that died is started again"
    await env.teardown()
    assert not is_running(pid_of(state))


async def test_a_project_that_does_not_come_up_says_why(scripted, project):
    (project / "server" / "main.py").write_text("raise RuntimeError('no such table')\n")
    state, _ = await play(vf.OpenEnvEnv(project, run_project="process"), scripted)
    assert isinstance(state["error"], InfraError)
    assert "RuntimeError: no such table" in str(state["error"])
    assert "\n" not in str(state["error"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_server_ends_with_a_process_that_is_killed(project):
    script = f"""
        import asyncio, os, sys
        sys.path.append({str(Path(__file__).parents[1])!r})
        from pathlib import Path
        from mettle_openenv.server import ProjectServer
        server = ProjectServer(Path({str(project)!r}), startup_timeout_s=30)
        asyncio.run(server.start())
        print(server.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(300):
        if not is_running(pid):
            return
        time.sleep(0.01)
    raise AssertionError(f"the server {pid} outlived its owner")


def test_what_could_never_work_is_refused(project):
    with pytest.raises(UserError, match='with your rights: allow it with run_project="process"'):
        vf.OpenEnvEnv(project)
    with pytest.raises(UserError, match=r"there is no OpenEnv project at .*/proj"):
        vf.OpenEnvEnv()
    (project / "openenv.yaml").write_text("app: server.other:app  # moved\n")
    with pytest.raises(UserError, match=r"there is no server/other.py for the app 'server.other:app'"):
        vf.OpenEnvEnv(project, run_project="process")
    with pytest.raises(UserError, match="not both"):
        vf.OpenEnvEnv(project, base_url="http://x")
    with pytest.raises(UserError, match="base_url begins with http"):
        vf.OpenEnvEnv(base_url="localhost:8000")
