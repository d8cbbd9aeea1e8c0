"""Tools of real MCP servers: listed, called, failing, hanging, dying, and gone afterwards."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.forking import forked_command

import mettle.envs as vf
from mettle.envs.tool_content import NOTHING, content_of
from mettle.errors import InfraError, UserError
from mettle.runs.ports import free_port

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")
SERVER = str(Path(__file__).with_name("mcp_server.py"))
ROWS = [{"question": "q", "answer": "a"}]


FORKED = {}


@pytest.fixture(scope="module", autouse=True)
def _forked_servers(tmp_path_factory):
    """Servers over standard streams begin with the SDK imported: it takes a second each time."""
    pytest.importorskip("mcp")
    script = tmp_path_factory.mktemp("forked") / "server"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(SERVER).parent))
        importlib.import_module("mcp_server")
        with forked_command(script, "mcp_server"):
            FORKED["command"] = str(script)
            yield


def local(name="test"):
    return {"name": name, "command": FORKED["command"]}


def apart():
    """A server with an interpreter of its own, which a signal to the command ends."""
    return {"name": "test", "command": sys.executable, "args": [SERVER]}


def calls(*pairs):
    made = [{"id": f"c{i}", "name": n, "arguments": json.dumps(a)} for i, (n, a) in enumerate(pairs)]
    return {"tool_calls": made}


def env_of(*servers, **options):
    return vf.MCPEnv(list(servers or [local()]), dataset=ROWS, **options)


async def converse(env, scripted, *said):
    turns = iter([*said, "bye"])
    client = scripted(lambda _: next(turns))
    return await env.run_rollout(env.get_dataset()[0], client, "m"), client


def answers(state):
    return [message["content"] for message in state["completion"] if message["role"] == "tool"]


def is_running(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


async def until_gone(pid):
    for _ in range(500):
        if not is_running(pid):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")


async def test_tools_are_listed_at_first_use_and_called(scripted):
    env = env_of(apart())
    assert env.tool_defs == []
    state, client = await converse(env, scripted, calls(("add", {"a": 3}), ("add", {"a": 1, "b": 1})))
    assert answers(state) == ["5", "2"]
    assert (state["error"], state["stop_condition"]) == (None, "no_tools_called")
    offered = {tool["name"]: tool for tool in client.calls[0]["tools"]}
    assert offered["add"]["description"] == "Add two numbers."
    assert offered["add"]["parameters"]["required"] == ["a"], "the server's schema is passed as it is"
    assert state["metrics"]["add_calls"] == state["metrics"]["total_tool_calls"] == 2.0
    assert state["metrics"]["bump_calls"] == 0.0
    pid = int(await env.call_server_tool("test", "pid", {}))
    assert is_running(pid)
    await env.teardown()
    await until_gone(pid)


async def test_what_a_tool_refuses_is_told_to_the_model(scripted):
    env = env_of(tool_timeout_s=0.3)
    state, _ = await converse(
        env,
        scripted,
        calls(
            ("fail", {"why": "no luck"}), ("add", {"a": "x"}), ("sub", {}), ("wait", {"seconds": 20}), ("nothing", {})
        ),
    )
    failed, invalid, unknown, slow, nothing = answers(state)
    assert failed.startswith("Error: ")
    assert "no luck" in failed
    assert "a" in invalid
    assert invalid.startswith("Error: ")
    assert "there is no tool 'sub'" in unknown
    assert slow == "Error: wait took longer than 0.3 s"
    assert nothing in (NOTHING, '{"result": null}')
    assert state["error"] is None
    await env.teardown()


async def test_pictures_and_resources_are_content_parts_and_long_text_is_cut(scripted):
    env = env_of(max_result_chars=1000)
    state, _ = await converse(env, scripted, calls(("picture", {}), ("huge", {"size": 3_000_000}), ("noise", {})))
    picture, huge, noise = answers(state)
    assert [part["type"] for part in picture] == ["text", "image_url", "text"]
    assert picture[1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert picture[2]["text"] == "a memo"
    assert huge == "x" * 1000 + "\n[2999000 more characters left out]"
    assert noise == "quiet again"
    await env.teardown()


async def test_a_server_that_dies_ends_the_rollout_and_lives_again_for_the_next(scripted):
    env = env_of()
    state, _ = await converse(env, scripted, calls(("die", {})))
    assert isinstance(state["error"], InfraError)
    assert state["reward"] is None
    assert "MCP server 'test'" in str(state["error"])
    assert "goodbye, cruel world" in str(state["error"])
    state, _ = await converse(env, scripted, calls(("bump", {})))
    assert (answers(state), state["error"]) == (["1"], None)
    await env.teardown()


async def test_a_server_killed_between_two_calls_is_started_again_when_shared(scripted):
    env = env_of()
    await env.list_tools()
    pid = int(await env.call_server_tool("test", "pid", {}))
    os.kill(pid, 9)
    await until_gone(pid)
    state, _ = await converse(env, scripted, calls(("bump", {})))
    if state["error"] is not None:  # the library had not noticed yet; this rollout found out
        assert isinstance(state["error"], InfraError)
        state, _ = await converse(env, scripted, calls(("bump", {})))
    assert answers(state) == ["1"]
    await env.teardown()


async def test_a_server_that_hangs_is_given_up(scripted):
    env = env_of(apart(), tool_timeout_s=0.2)
    state, _ = await converse(env, scripted, calls(("hang", {})))
    if isinstance(state["error"], InfraError):
        assert "answers nothing any more" in str(state["error"])
    else:  # this version of the library runs tools beside its loop
        assert answers(state) == ["Error: hang took longer than 0.2 s"]
    await env.teardown()


async def test_every_rollout_can_have_a_server_of_its_own(scripted):
    env = env_of(connection="rollout")
    states = await asyncio.gather(
        *(converse(env, scripted, calls(("bump", {}), ("bump", {}), ("pid", {}))) for _ in range(2))
    )
    said = [answers(state) for state, _ in states]
    assert [texts[:2] for texts in said] == [["1", "2"]] * 2
    pids = {int(texts[2]) for texts in said}
    assert len(pids) == 2
    for pid in pids:
        await until_gone(pid)


async def test_one_server_is_shared_by_all_rollouts_by_default(scripted):
    env = env_of()
    states = await asyncio.gather(*(converse(env, scripted, calls(("bump", {}))) for _ in range(4)))
    assert sorted(answers(state)[0] for state, _ in states) == ["1", "2", "3", "4"]
    await env.teardown()


def test_two_loops_one_after_the_other_each_leave_no_process(scripted):
    env = env_of()
    pids = []
    for _ in range(2):
        turns = iter([calls(("pid", {})), "bye"])
        outputs = env.evaluate_sync(scripted(lambda _, turns=turns: next(turns)), "m").outputs
        pids.append(int(outputs[0]["completion"][1]["content"]))
    assert pids[0] != pids[1]
    asyncio.run(until_gone(pids[0]))
    asyncio.run(until_gone(pids[1]))


async def test_names_that_two_servers_share_are_told_apart(scripted):
    def bump() -> str:
        """Ours."""
        return "ours"

    env = env_of(local("one"), local("two"), tools=[bump])
    state, client = await converse(env, scripted, calls(("bump", {}), ("one_bump", {}), ("two_add", {"a": 1})))
    assert answers(state) == ["ours", "1", "3"]
    assert {"one_add", "two_add", "bump", "one_bump"} <= {tool["name"] for tool in client.calls[0]["tools"]}
    await env.teardown()


@pytest.mark.parametrize(
    ("mode", "says"), [("silent", "said nothing for 0.5 s"), ("garbage", "said nothing for 0.5 s")]
)
async def test_a_server_that_does_not_speak_the_protocol_is_the_rollouts_error(scripted, mode, says):
    script = {
        "silent": "import time; time.sleep(60)",
        "garbage": "import sys, time\nprint('I am not a server', file=sys.stderr, flush=True)\n"
        "while True: print('hello?', flush=True); time.sleep(0.05)",
    }[mode]
    env = env_of({"name": "odd", "command": sys.executable, "args": ["-c", script]}, connect_timeout_s=0.5)
    state, _ = await converse(env, scripted)
    assert isinstance(state["error"], InfraError)
    assert says in str(state["error"])
    assert "\n" not in str(state["error"])
    if mode == "garbage":
        assert "I am not a server" in str(state["error"])
    await env.teardown()


async def test_a_program_that_ends_at_once_says_why(scripted):
    env = env_of({"name": "broken", "command": sys.executable, "args": ["-c", "import no_such_module_here"]})
    state, _ = await converse(env, scripted)
    assert "No module named 'no_such_module_here'" in str(state["error"])


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ({"command": "x"}, "with a name and a command or a url"),
        ({"name": "s"}, "'s' needs a command or a url, and not both"),
        ({"name": "s", "command": "sh", "url": "http://x"}, "and not both"),
        ({"name": "s", "url": "localhost:3"}, "begins with http://"),
        ({"name": "s", "command": "no-such-program-here"}, "needs the program 'no-such-program-here'"),
        ({"name": "s", "command": "sh", "comand": "x"}, "no setting 'comand'; there are name, command"),
    ],
)
def test_a_server_that_could_never_be_reached_is_refused(server, says):
    with pytest.raises(UserError, match=says):
        env_of(server)


def test_other_mistakes_are_refused_too(monkeypatch, scripted):
    with pytest.raises(UserError, match="two MCP servers are named 'test'"):
        env_of(local(), local())
    with pytest.raises(UserError, match="connection is one of shared, rollout, not 'each'"):
        env_of(connection="each")
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(
        UserError, match=r"MCPEnv needs mcp, which is not installed: pip install .*adapters/mcp brings it"
    ):
        asyncio.run(env_of().list_tools())


def test_a_config_object_is_taken_as_upstreams():
    env = env_of(vf.MCPServerConfig("test", sys.executable, [SERVER], {"A": "b"}, "about"))
    assert env.mcp_servers[0].env == {"A": "b"}


@pytest.fixture
async def http_server():
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, SERVER, "http", str(port))
    async with asyncio.timeout(100):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except OSError:
                await asyncio.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp", process
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_a_server_over_http_is_called_and_its_end_is_an_error(scripted, http_server):
    url, process = http_server
    env = env_of({"name": "web", "url": url, "headers": {"X-Test": "1"}}, tool_timeout_s=5)
    state, _ = await converse(env, scripted, calls(("add", {"a": 3}), ("fail", {"why": "no luck"})))
    assert answers(state)[0] == "5"
    assert "no luck" in answers(state)[1]
    process.kill()
    await process.wait()
    state, _ = await converse(env, scripted, calls(("add", {"a": 3})))
    assert isinstance(state["error"], InfraError), answers(state)
    state, _ = await converse(env, scripted, calls(("add", {"a": 3})))
    assert isinstance(state["error"], InfraError)
    await env.teardown()


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({}, NOTHING),
        ({"content": [], "structuredContent": {"a": 1}}, '{"a": 1}'),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": [{"type": "resource_link", "name": "n", "description": "d", "uri": "u"}]}, "[n: d](u)"),
        ({"content": [{"type": "resource", "resource": {"blob": "AAAA", "mimeType": "x/y"}}]}, "[x/y of 3 bytes]"),
        ({"content": [{"type": "new_kind", "x": 1}]}, '{"type": "new_kind", "x": 1}'),
        (
            {"content": [{"type": "audio", "data": "AAAA", "mimeType": "audio/x-wav"}]},
            [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
        ),
        (
            {"content": [{"type": "image", "data": "A" * 20_000_001, "mimeType": "image/png"}]},
            "[image/png of 15000000 bytes, too large to show]",
        ),
    ],
)
def test_every_kind_of_content_is_shown_or_named(result, content):
    assert content_of(result, 1000) == content
