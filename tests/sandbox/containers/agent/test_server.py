"""The agent as a process of this host, without a container: its wire, its ends, and what code inside may not see."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from owners import is_alive, wait_until

from mettle.errors import UserError
from mettle.sandbox.containers.agent.boot import BOOT
from mettle.sandbox.containers.bundle import make_bundle
from mettle.sandbox.containers.link import AgentLink
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.endings import MachineLost


class Pipes:
    """The standard streams of the agent's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self._reader, self._writer = process.stdout, process.stdin

    async def read(self) -> bytes:
        return await self._reader.read(1 << 16)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def close(self) -> None:
        self._writer.close()


class Started:
    """An agent, and the link to it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.link = AgentLink(Pipes(process), "agent", self._outcome)

    async def _outcome(self) -> MachineLost:
        return MachineLost(f"it ended with status {await self.process.wait()}")

    async def exec(self, command: list[str]) -> dict[str, Any]:
        body = {"command": command, "cwd": "/", "stream": "result"}
        [line] = [line async for line in self.link.connection.lines("/machines/m/exec", body)]
        result: dict[str, Any] = line["result"]
        return result


@pytest_asyncio.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Started]:
    archive = tmp_path / "agent.zip"
    archive.write_bytes(make_bundle().data)
    command = [sys.executable, "-I", "-S", "-B", "-c", BOOT, str(archive), "--stdio"]
    environment = {"PATH": os.environ["PATH"], "METTLE_AGENT_IDENTITY": "the-secret", "IMAGE": "its own"}
    process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, env=environment)
    started = Started(process)
    await started.link.wait_ready(100)
    limits = MachineConfig(env={"PATH": os.environ["PATH"]}).limits()
    await started.link.connection.ask("PUT", "/machines/m", json={"limits": limits._asdict()})
    yield started
    await started.link.close()
    await process.wait()


async def test_it_ends_with_the_stream_to_its_owner(agent: Started) -> None:
    await agent.link.close()
    async with asyncio.timeout(100):
        assert await agent.process.wait() == 0


async def test_a_stream_that_makes_no_sense_ends_it_and_nothing_else(agent: Started) -> None:
    agent.link._stream.write(b"\xff" * 100)
    async with asyncio.timeout(100):
        assert await agent.process.wait() == 0
        await agent.link.closed.wait()
    assert "it ended with status 0" in str(agent.link.lost)


LOOK = """
import os
agent = os.getppid()
while agent > 1 and b"agent" not in open(f"/proc/{agent}/cmdline", "rb").read():
    agent = int(open(f"/proc/{agent}/stat").read().rpartition(")")[2].split()[1])
for name in ("environ", "mem", "fd"):
    try:
        print(name, os.listdir(f"/proc/{agent}/fd") if name == "fd" else open(f"/proc/{agent}/{name}", "rb").read(4096))
    except OSError as error:
        print(name, error.strerror)
"""


async def test_code_inside_finds_no_secret_and_cannot_look_into_the_agent(agent: Started) -> None:
    shown = await agent.exec([sys.executable, "-c", LOOK])
    assert shown["exit_code"] == 0, shown
    assert shown["stdout"].startswith("environ ")
    assert "the-secret" not in shown["stdout"]
    if os.geteuid() != 0:  # root may look into every process
        assert shown["stdout"] == "environ Permission denied\nmem Permission denied\nfd Permission denied\n"
    shown = await agent.exec(["sh", "-c", "cat /proc/self/environ /proc/$PPID/environ 2>&1; env; echo looked"])
    assert shown["stdout"].endswith("looked\n")
    assert "the-secret" not in shown["stdout"]


@pytest.mark.parametrize(
    ("method", "path", "body", "words"),
    [
        ("GET", "/nowhere", None, "no GET"),
        ("POST", "/machines/m/exec", {}, "command"),
        ("POST", "/machines/m/exec", {"command": "x", "stdin_base64": "*"}, "base64"),
        ("GET", "/machines/m/fetch/me", None, "no GET"),
        ("POST", "/machines/m/exec", {"command": "x" * (33 << 20)}, "more than 32 MB"),
    ],
)
async def test_what_is_asked_wrongly_is_said_and_the_next_request_is_answered(
    agent: Started, method: str, path: str, body: dict[str, Any] | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        await agent.link.connection.ask(method, path, **({} if body is None else {"json": body}))
    assert (await agent.exec(["echo", "well"]))["stdout"] == "well\n"


async def test_a_request_that_is_left_takes_its_command_along(agent: Started, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    running = asyncio.create_task(agent.exec(["sh", "-c", f"echo $$ > {told}; exec sleep 600"]))
    await wait_until(lambda: told.exists() and told.read_text().endswith("\n"))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await wait_until(lambda: not is_alive(int(told.read_text())))


async def test_ports_inside_are_reached_by_websockets(agent: Started) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        path = f"/machines/m/connect/{server.getsockname()[1]}"
        async with agent.link.connection.websocket(path) as ws:
            connection, _ = await asyncio.get_running_loop().sock_accept(server)
            with connection:
                for size in (1, 125, 126, 70_000):
                    await ws.send_bytes(bytes(size))
                    got = bytearray()
                    while len(got) < size:
                        got += await asyncio.get_running_loop().sock_recv(connection, 1 << 20)
                    assert bytes(got) == bytes(size)
                await asyncio.get_running_loop().sock_sendall(connection, b"y" * 70_000)
                got = bytearray()
                while len(got) < 70_000:
                    got += (await ws.receive()).data
                assert bytes(got) == b"y" * 70_000
    with pytest.raises(ConnectionRefusedError):
        async with agent.link.connection.websocket(path):
            pass
