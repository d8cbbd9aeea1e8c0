"""Every route of every server, against everybody who should not be let in.

The routes are those that the servers themselves list, and the servers those that the sources open, so that a new one
of either cannot be forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.routing import BaseRoute, Mount, Route

from mettle.envs.proxy.calls import DIALECTS
from mettle.envs.proxy.server import ProxyServer
from mettle.hub.app import create_app
from mettle.inference import server as inference
from mettle.inference.bridge import Bridge
from mettle.inference.engine.mock import MockEngine
from mettle.inference.service import ModelService
from mettle.sandbox.service import app as sandbox
from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.routes import prime_gateway
from mettle.sandbox.service.server import listening
from mettle.sandbox.service.state import Pass
from mettle.sandbox.service.tokens import add_token, digest
from mettle.web.app import Row
from mettle.web.keys import Keys
from mettle.web.server import HttpServer, bind

SOURCES = Path(__file__).parents[2] / "src" / "mettle"
KEYS = Keys("the api key", "the admin key")
HUGE = str(1 << 42)
GATEWAY = [row[1] for row in prime_gateway.ROUTES]


@dataclass(frozen=True)
class Target:
    """A path of a server: its methods, and what opens it ("": nothing is needed)."""

    port: int
    path: str
    methods: frozenset[str]
    secret: str = ""
    is_websocket: bool = False
    more: dict[str, str] = field(default_factory=dict)

    @property
    def opens(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"} if self.secret else {}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def ask(target: Target, method: str, **changes: str) -> Answer:
    """One request as it stands on the wire."""
    headers = {"Host": f"127.0.0.1:{target.port}", "Connection": "close", **target.more}
    headers |= {name.replace("_", "-"): value for name, value in changes.items()}
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    try:
        lines = [f"{method} {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        async with asyncio.timeout(20):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    first, *rest = head.decode("latin-1").split("\r\n")
    found = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
    return Answer(int(first.split()[1]), found, body)


def filled(path: str) -> str:
    """A path with something in its places."""
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda m: "1" if m[1] in ("eval_id", "index", "port") else "x", path)


def by_path(table: list[Row]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in table:
        found.setdefault(row[1], []).append(row)
    return found


@contextlib.asynccontextmanager
async def inference_routes(tmp_path: Path) -> AsyncIterator[list[Target]]:
    renderer: Any = SimpleNamespace(stop_token_ids=(), visible_text=str)
    service = ModelService(Bridge(MockEngine()), renderer, "policy")
    running = inference.InferenceServer(service, bind("127.0.0.1", 0), keys=KEYS)
    await running.start()
    secret_of = {"anybody": "", "key": KEYS.api, "admin": KEYS.admin}
    yield [
        Target(running.port, path, frozenset(row[0] for row in rows), secret_of[(*rows[0], "key")[3]])
        for path, rows in by_path(inference.ROUTES).items()
    ]
    await running.stop(0)


@contextlib.asynccontextmanager
async def sandbox_routes(tmp_path: Path) -> AsyncIterator[list[Target]]:
    token = add_token(tmp_path / "tokens.json", "tester")
    settings = {"port": 0, "tokens_file": str(tmp_path / "tokens.json"), "spool_dir": str(tmp_path), "grace_s": 0}
    config = ServiceConfig.model_validate({**settings, "sandbox": {"backend": "unsafe", "warm": 0}})
    async with listening(config) as (service, url):
        port = int(url.rpartition(":")[2])
        secret_of = {path: "" for path in sandbox.OPEN} | {path: "the pass" for path in GATEWAY}
        service.passes[digest("the pass")] = Pass(service.tokens.holder(f"Bearer {token}"), "x", float("inf"))
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        upgrade["Sec-WebSocket-Key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
        yield [
            *(
                Target(port, filled(path), frozenset(row[0] for row in rows), secret_of.get(path, token))
                for path, rows in by_path(sandbox.ROUTES).items()
            ),
            *(
                Target(port, filled(path), frozenset({"GET"}), token, is_websocket=True, more=upgrade)
                for path, _ in sandbox.WEBSOCKETS
            ),
        ]


@contextlib.asynccontextmanager
async def hub_routes(tmp_path: Path) -> AsyncIterator[list[Target]]:
    app = create_app(tmp_path)
    listener = bind("127.0.0.1", 0)
    running = HttpServer(app, listener)
    port = listener.getsockname()[1]
    await running.start()
    found: dict[str, frozenset[str]] = {}
    for route in walked(app.routes):
        path = f"{route.path}/hub.css" if isinstance(route, Mount) else filled(route.path)
        found[path] = found.get(path, frozenset()) | frozenset(getattr(route, "methods", None) or {"GET"}) - {"HEAD"}
    yield [Target(port, path, methods) for path, methods in found.items()]
    await running.stop()


def walked(routes: list[BaseRoute]) -> Iterator[Any]:
    """Routes, those of included routers among them."""
    for route in routes:
        inner = getattr(getattr(route, "original_router", None), "routes", None)
        if inner is not None:
            yield from walked(inner)
        else:
            assert isinstance(route, Route | Mount), route
            yield route


@contextlib.asynccontextmanager
async def proxy_routes(tmp_path: Path) -> AsyncIterator[list[Target]]:
    proxy = ProxyServer()
    session = proxy.open(SimpleNamespace(count_tokens=lambda call: 1), "policy")  # type: ignore[arg-type]
    listener = await proxy.listen()
    yield [
        Target(listener.port, "/v1/models", frozenset({"GET"}), session.secret),
        *(Target(listener.port, f"/v1{path}", frozenset({"POST"}), session.secret) for path in DIALECTS),
    ]
    await proxy.close()


SERVERS = {
    "inference/server.py": inference_routes,
    "sandbox/service/server.py": sandbox_routes,
    "hub/server.py": hub_routes,
    "envs/proxy/server.py": proxy_routes,
}

INSIDE_MACHINES = {"sandbox/machines/egress.py", "sandbox/testing/ports.py"}
"""Sockets of a machine's own network, which nothing outside of it reaches."""


def test_every_server_is_in_the_table():
    opening = re.compile(r"\b(HttpServer\(|uvicorn\.(run|Server)|TCPSite\(|start_server\()")
    found = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if opening.search(path.read_text())}
    assert found == {*SERVERS, "web/server.py", *INSIDE_MACHINES}


@pytest.mark.parametrize("name", SERVERS)
async def test_no_route_lets_in_who_has_no_business_there(name: str, tmp_path: Path) -> None:
    async with SERVERS[name](tmp_path) as targets:
        assert len(targets) > 3
        for target in targets:
            for method in sorted(target.methods):
                await _is_closed(target, method)
            if not target.is_websocket:
                await _knows_its_methods(target)


async def _is_closed(target: Target, method: str) -> None:
    told = f"{method} {target.path}"
    assert (await ask(target, method, **target.opens, Host="evil.example")).status == 400, told
    for origin in ("https://evil.example", "null"):
        assert (await ask(target, method, **target.opens, Origin=origin)).status == 403, told
    if target.secret:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": target.secret}):
            assert (await ask(target, method, **given)).status == 401, told
    if not target.is_websocket and (method != "GET" or not target.path.startswith("/v1/models")):
        assert (await ask(target, method, **target.opens, Content_Length=HUGE)).status == 413, told


async def _knows_its_methods(target: Target) -> None:
    wrong = await ask(target, "PATCH", **target.opens)
    assert wrong.status == 405, target.path
    allowed = {word.strip() for word in wrong.headers["allow"].split(",")}
    assert allowed - {"HEAD"} == target.methods, target.path
    head = await ask(target, "HEAD", **target.opens)
    if "GET" in target.methods:
        got = await ask(target, "GET", **target.opens)
        assert (head.status, head.body, head.headers["content-type"]) == (got.status, b"", got.headers["content-type"])
    else:
        # 404: the path has the form of another one, which takes GET.
        assert (head.status, head.body) in ((405, b""), (404, b"")), target.path


async def test_a_server_that_a_person_starts_has_its_admin_routes_closed() -> None:
    service = ModelService(Bridge(MockEngine()), SimpleNamespace(), "policy")  # type: ignore[arg-type]
    running = inference.InferenceServer(service, bind("127.0.0.1", 0))
    await running.start()
    for path in ("/admin/pause", "/admin/resume", "/admin/weights"):
        for given in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}):
            answer = await ask(Target(running.port, path, frozenset({"POST"})), "POST", **given)
            assert answer.status == 403
            assert b"METTLE_ADMIN_KEY" in answer.body
    assert (await ask(Target(running.port, "/v1/models", frozenset({"GET"})), "GET")).status == 200
    assert not service.engine.status().is_paused
    await running.stop(0)
