"""Clients that try to use a service up: with connections, with what it remembers of them, with passes and with values.

And something at a service's address that is none, for its clients.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from mettle.errors import UserError
from mettle.sandbox.service import faults
from mettle.sandbox.service.client import connection
from mettle.sandbox.service.client.client import ServiceClient
from mettle.sandbox.service.faults import ServiceLost
from mettle.sandbox.service.tokens import revoke_token
from serving import ApiCaller, make_token, wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("_needs_isolation")]


@pytest.mark.parametrize("field", ["labels", "env"])
async def test_what_a_service_remembers_of_a_machine_is_small(api: ApiCaller, field: str) -> None:
    status, refused = await api.ask("POST", "/machines", json={field: {"a": "x" * 70_000}})
    assert (status, refused["error"]["type"]) == (400, "user")
    long = {"name": "x" * 10_000, "disk_size_gb": 0.1, "cpu_cores": 1}
    status, made = await api.ask("POST", "/sandbox", json=long)
    assert (status, len(made["name"])) == (201, 100)
    assert (await api.ask("POST", "/sandbox", json={**long, "docker_image": "x" * 10_000}))[0] == 400
    await api.ask("DELETE", f"/sandbox/{made['id']}")


async def test_the_first_files_of_a_machine_are_there_and_are_not_remembered(api: ApiCaller) -> None:
    machine = await api.create(files={"a/b": "first"}, memory_mb=64, disk_mb=4)
    assert (await api.ask("GET", f"/machines/{machine}/files?path=/work/a/b"))[1] == b"first"
    assert api.service.register._records[machine].machine.config.files == {}
    await api.ask("DELETE", f"/machines/{machine}")
    status, refused = await api.ask("POST", "/machines", json={"files": {"/usr/no": "x"}, "disk_mb": 4})
    assert (status, refused["error"]["type"]) == (422, "os")
    assert (await api.ask("GET", "/status"))[1]["token"]["num_machines"] == 0, "its share was given back"


async def test_a_sandbox_with_a_strange_number_of_cores_is_refused(api: ApiCaller) -> None:
    assert (await api.ask("POST", "/sandbox", json={"cpu_cores": "abc"}))[0] == 400


async def test_a_pass_ends_with_the_token_that_it_was_given_for(api: ApiCaller) -> None:
    token = make_token(api.home, "leaver")
    _, made = await api.ask("POST", "/sandbox", token=token, json={"disk_size_gb": 0.1})
    _, gate = await api.ask("POST", f"/sandbox/{made['id']}/auth", token=token)
    path, order = f"/gw/m/{made['id']}/exec", {"command": "true"}
    assert (await api.ask("POST", path, token=gate["token"], json=order))[0] == 200
    revoke_token(api.home / "tokens.json", "leaver")
    assert (await api.ask("POST", path, token=gate["token"], json=order))[0] == 401


async def test_a_sandbox_has_few_passes_and_the_newest_are_good(api: ApiCaller) -> None:
    _, made = await api.ask("POST", "/sandbox", json={"disk_size_gb": 0.1})
    gates = [(await api.ask("POST", f"/sandbox/{made['id']}/auth"))[1] for _ in range(40)]
    assert sum(one.machine_id == made["id"] for one in api.service.passes.values()) == 32
    path, order = f"/gw/m/{made['id']}/exec", {"command": "true"}
    assert (await api.ask("POST", path, token=gates[0]["token"], json=order))[0] == 401
    assert (await api.ask("POST", path, token=gates[-1]["token"], json=order))[0] == 200
    await api.ask("DELETE", f"/sandbox/{made['id']}")


@pytest.mark.parametrize(
    "value",
    [
        {"$float": 10**400},
        {"$record": "StrEnum", "value": "Made", "names": "A B"},
        {"$set": [{"$int": format(n * ((1 << 61) - 1), "x")} for n in range(40_000)]},
        {"$dict": [[{"$int": format(n * ((1 << 61) - 1), "x")}, 1] for n in range(40_000)]},
    ],
    ids=["float", "enum", "set", "dict"],
)
async def test_a_value_that_was_made_to_hurt_is_refused_at_once(api: ApiCaller, value: Any) -> None:
    test = {"function": "f", "args": [], "expected": value}
    begun = time.process_time()
    body = io.BytesIO(json.dumps({"code": "def f(): pass", "tests": [test]}).encode())
    status, refused = await api.ask("POST", "/judge", data=body)
    assert (status, refused["error"]["type"]) == (400, "user")
    assert "not an encoded value" in refused["error"]["message"]
    assert time.process_time() - begun < 3
    await wait_until(lambda: _is_idle(api))


async def _is_idle(api: ApiCaller) -> bool:
    return api.service.num_judging == 0


async def endless(response: web.StreamResponse) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b"x" * (1 << 16))


async def deep(response: web.StreamResponse) -> None:
    await response.write(b"[" * 100_000 + b"\n")


async def other(response: web.StreamResponse) -> None:
    await response.write(b"[1]\n")


async def hollow(response: web.StreamResponse) -> None:
    await response.write(b'{"status": "running"}\n')


@contextlib.asynccontextmanager
async def impostor(say: Callable[[web.StreamResponse], Awaitable[None]], status: int) -> AsyncIterator[ServiceClient]:
    """A client of something that only looks like a service."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        await say(response)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with ServiceClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            yield client
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("say", [endless, deep, other, hollow], ids=lambda say: say.__name__)
async def test_an_answer_that_no_service_gives_is_a_lost_service(
    say: Callable[[web.StreamResponse], Awaitable[None]], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MAX_ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(connection, "_MAX_ERROR_BYTES", 1 << 20)
    async with impostor(say, status) as client:
        for asked in (client.machine("m-1"), client.delete(["m-1"]), anext(client.connection.lines("/x", {}))):
            with pytest.raises(ServiceLost):
                (await asked)["result"]  # type: ignore[index]


async def test_no_message_of_a_service_steers_a_terminal() -> None:
    said = {"type": "user", "message": "\x1b]0;owned\x07 one\nline \x9b2J", "errno": 2, "strerror": "\x1b[2J"}
    for kind in ("user", "os", "sandbox"):
        error = faults.rebuild(400, json.dumps({"error": {**said, "type": kind, "what": "\x1b[8m"}}).encode())
        assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in str(error)), repr(str(error))
    assert "\x1b" not in faults.describe(UserError("a \x1b[2J b"))["message"]
