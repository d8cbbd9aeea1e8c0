"""Sandboxes as a part of the Hub: its people and scopes decide, before anything is started; the page that shows them."""

from __future__ import annotations

import re

import httpx
import pytest
from tests.hub.lab_writer import PASSWORD, HubWriter
from tests.serving import HOST, on_a_loop

from mettle.hub.accounts import audit
from mettle.hub.app import create_app
from mettle.hub.sandboxes import HubSandboxes
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.service import connect_rpc
from mettle.sandbox.service.config import QuotaConfig
from mettle.web.server import HttpServer, bind, url_of

PATHS = ("/api/v1/sandbox", "/api/v1/machines", "/api/v1/status", "/api/v1/sandbox/status:batchGet")
SMALL = {"name": "acc", "disk_size_gb": 0.1, "memory_gb": 0.1}


@pytest.fixture(scope="module")
def offered(tmp_path_factory):
    """The address of a Hub with bob and eve that offers two unisolated sandboxes a person, and who makes its tokens."""
    hub = HubWriter(tmp_path_factory.mktemp("offered") / "hub")
    hub.person("ann", is_admin=True)
    hub.person("bob")
    hub.person("eve")
    listener = bind(HOST, 0)
    with on_a_loop() as run:

        async def start():
            sandboxes = HubSandboxes(hub.lab, HOST, SandboxConfig(backend="unsafe"), QuotaConfig(max_machines=2))
            server = HttpServer(create_app(hub.lab.folder / "runs", lab=hub.lab, sandboxes=sandboxes), listener)
            await server.start()
            return sandboxes, server

        sandboxes, server = run(start())
        yield url_of(HOST, listener.getsockname()[1]), hub
        run(sandboxes.close())
        run(server.stop())
    hub.close()


@pytest.fixture
def client(offered):
    """A client with a token of somebody, for some scopes; without a name, with none."""

    def made(who="", *scopes):
        headers = {"Authorization": f"Bearer {offered[1].token(who, *scopes)}"} if who else {}
        return httpx.Client(base_url=offered[0], headers=headers, timeout=100)

    return made


@pytest.fixture
def session(offered):
    """A client that has signed in on the page, and the CSRF word of its session."""

    def made(who):
        client = httpx.Client(base_url=offered[0], timeout=100)
        client.post("/signin", data={"username": who, "password": PASSWORD})
        return client, re.search(r'name="csrf" value="([^"]+)"', client.get("/account").text)[1]

    return made


def test_who_may_not_ask_is_refused(client):
    for who, read, write in (
        (("",), 401, 401),
        (("bob", "training:write"), 403, 403),
        (("bob", "sandboxes:read"), 0, 403),
    ):
        with client(*who) as somebody:
            for path in PATHS:
                assert not read or somebody.get(path).status_code == read, (who, path)
                assert somebody.post(path, json={}).status_code == write, (who, path)
    with client() as nobody:
        assert nobody.get("/api/v1/sandbox", headers={"Authorization": "Bearer mtl_none"}).status_code == 401
        assert nobody.get("/api/v1/sandbox", headers={"Host": "evil.test"}).status_code == 400


def test_a_sandbox_is_one_persons_and_noted(client, offered):
    with client("bob") as bob, client("eve") as eve, client() as nobody:
        made = bob.post("/api/v1/sandbox", json=SMALL).json()
        assert made["userId"] == bob.get("/api/v1/user/whoami").json()["data"]["id"]
        assert eve.get(f"/api/v1/sandbox/{made['id']}").status_code == 404
        gate = bob.post(f"/api/v1/sandbox/{made['id']}/auth").json()
        nobody.headers["Authorization"] = f"Bearer {gate['token']}"
        base = f"{gate['gateway_url']}/{gate['user_ns']}/{gate['job_id']}"
        assert nobody.post(f"{base}/exec", json={"command": "echo $((6 * 7))"}).json()["stdout"] == "42\n"

        told = connect_rpc._field(
            1,
            b"".join(
                connect_rpc._field(1 + bool(n), w)
                for n, w in enumerate((b"sh", b"-c", b"echo out; echo err >&2; exit 3"))
            ),
        )
        session, headers = f"{base}/command_session.CommandSession/Start", {"content-type": connect_rpc.CONTENT_TYPE}
        stream = nobody.post(session, content=connect_rpc._envelope(told), headers=headers).content
        for part in (connect_rpc.output("stdout", b"out\n"), connect_rpc.output("stderr", b"err\n")):
            assert part in stream
        assert stream.endswith(connect_rpc.ended(3) + connect_rpc.last())
        slow = connect_rpc._field(1, connect_rpc._field(1, b"sleep") + connect_rpc._field(2, b"100"))
        late = {**headers, "connect-timeout-ms": "200"}
        assert b"deadline_exceeded" in nobody.post(session, content=connect_rpc._envelope(slow), headers=late).content
        assert b"invalid_argument" in nobody.post(session, content=b"\x00\x00", headers=headers).content

        with bind(HOST, 0) as free:
            port = free.getsockname()[1]
        answers = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        serve = f"python3 -m http.server {port} --bind 127.0.0.1 >/dev/null 2>&1 & "
        serve += f'for i in $(seq 500); do python3 -c "{answers}" 2>/dev/null && break; done'
        nobody.post(f"{base}/exec", json={"command": serve, "timeout": 100})
        opened = bob.post(f"/api/v1/sandbox/{made['id']}/expose", json={"port": port, "name": "web"}).json()
        assert "Directory listing" in httpx.get(opened["url"], timeout=100).text
        assert bob.get("/api/v1/sandbox/expose/all").json()["exposures"] == [opened]
        assert eve.get("/api/v1/sandbox/expose/all").json()["exposures"] == []
        assert eve.post(f"/api/v1/sandbox/{made['id']}/expose", json={"port": port}).status_code == 404
        bob.delete(f"/api/v1/sandbox/{made['id']}/expose/{opened['exposure_id']}")
        with pytest.raises(httpx.HTTPError):
            httpx.get(opened["url"], timeout=100)

        assert bob.post("/api/v1/sandbox", json=SMALL).status_code == 201
        refused = bob.post("/api/v1/sandbox", json=SMALL)
        assert (refused.status_code, "max_machines 2" in refused.text) == (429, True)
        bob.delete(f"/api/v1/sandbox/{made['id']}")
        gone = nobody.post(session, content=connect_rpc._envelope(told), headers=headers).content
        assert b'"not_found"' in gone
    sandboxes_noted(offered[1], made["id"])


def test_people_see_and_end_their_own_sandboxes_and_admins_all(client, session):
    (bob, bobs), (eve, eves), (ann, anns) = session("bob"), session("eve"), session("ann")
    with client("bob") as program:
        for each in program.get("/api/v1/sandbox?is_active=true").json()["sandboxes"]:
            program.delete(f"/api/v1/sandbox/{each['id']}")
        first, second = (program.post("/api/v1/sandbox", json={**SMALL, "name": n}).json()["id"] for n in ("a1", "a2"))
        shown = bob.get("/sandboxes").text
        assert f'name="id" value="{first}"' in shown
        assert "None of yours runs" in eve.get("/sandboxes").text
        assert first not in eve.get("/sandboxes").text
        everybody = ann.get("/sandboxes").text
        assert "<td>bob</td>" in everybody
        assert f'name="id" value="{second}"' in everybody

        def end(page, csrf, machine):
            return page.post("/sandboxes", data={"csrf": csrf, "action": "end", "id": machine}).status_code

        assert end(eve, eves, first) == 404, "what is not hers is not there"
        assert end(bob, eves, first) == 403, "the word of another session"
        assert program.post("/sandboxes", data={"action": "end", "id": first}).status_code == 403, "no token ends one"
        assert bob.post("/sandboxes", data={"csrf": bobs, "action": "burn", "id": first}).status_code == 400
        assert program.get(f"/api/v1/sandbox/{first}").json()["status"] == "RUNNING"
        assert (end(bob, bobs, first), end(ann, anns, second)) == (303, 303)
        assert program.get(f"/api/v1/sandbox/{first}").json()["status"] == "TERMINATED"
        assert "ann ended it" in program.get(f"/api/v1/sandbox/{second}").json()["errorMessage"]
        assert end(bob, bobs, first) == 404, "it has ended"


def test_the_page_says_when_there_are_none_and_starts_nothing(hub):
    bob = hub.signed_in("bob")
    assert "This Hub offers no sandboxes" in bob.get("/sandboxes").text
    offered = HubSandboxes(hub.lab, HOST, SandboxConfig(backend="unsafe"), QuotaConfig(max_machines=7))
    hub.app.state.sandboxes = offered
    text = bob.get("/sandboxes").text
    assert "No sandbox has been asked for yet" in text
    assert "may have 7 at a time" in text
    assert bob.form("/sandboxes", action="end", id="none").status_code == 404
    assert offered.service is None


def sandboxes_noted(hub, machine):
    for _ in range(1000):
        with hub.lab.database.read() as c:
            lines = [(e.actor, e.action) for e in audit.newest(c) if e.subject == machine]
        if len(lines) == 2:
            break
    assert lines == [("bob", "sandbox.end"), ("bob", "sandbox.create")]
