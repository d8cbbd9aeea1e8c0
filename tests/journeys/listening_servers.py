"""Every server of ours as people start it, with the routes that it lists itself.

Parts: `Target` (a path, what opens it and what it may be asked), `ask` (one request as it stands on the wire),
`SERVERS` (how each is started, by the source that opens it), `INSIDE_MACHINES` (sockets that are none of this host's).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.routing import BaseRoute, Mount, Route
from tokenizers import Tokenizer, models

from mettle.clients.renderer import Renderer
from mettle.envs.proxy.calls import DIALECTS
from mettle.envs.proxy.server import ProxyServer
from mettle.hub.app import create_app
from mettle.inference import server as inference
from mettle.inference.bridge import Bridge
from mettle.inference.engine.mock import MockEngine
from mettle.inference.outside import door as outside
from mettle.inference.outside.auditor import Auditor
from mettle.inference.outside.checks import AuditBounds
from mettle.inference.outside.config import OutsideConfig
from mettle.inference.outside.engine import OutsideEngine
from mettle.inference.outside.files import PieceStore
from mettle.inference.outside.roster import Roster, invite
from mettle.inference.replicated import Serving
from mettle.inference.service import ModelService
from mettle.runs.ports import free_port
from mettle.sandbox.service import app as sandbox
from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.messages import PREFIX
from mettle.sandbox.service.routes import prime_gateway
from mettle.sandbox.service.server import listening
from mettle.sandbox.service.state import Pass
from mettle.sandbox.service.tokens import add_token, digest
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig
from mettle.trainer.service import server as training
from mettle.trainer.service.config import TrainServeConfig
from mettle.web.app import Row
from mettle.web.keys import Keys
from mettle.web.server import HttpServer, bind

KEYS = Keys("the api key", "the admin key")
GATEWAY = [row[1] for row in prime_gateway.ROUTES]
# How a handler says what it reads: a model of its body or its query, or a word of its query.
_READS = re.compile(r"\b([A-Z]\w+Query)\.read|read_(?:body|model)\(\s*request, ([A-Z]\w+)|checked\(([A-Z]\w+)")
_WORDS = re.compile(r"query_params\.get(?:list)?\(\"(\w+)\"")


@dataclass(frozen=True)
class Target:
    """A path of a server: its methods, what opens it ("": nothing is needed), and what it knows in a query or body."""

    port: int
    path: str
    methods: frozenset[str]
    secret: str = ""
    is_websocket: bool = False
    more: dict[str, str] = field(default_factory=dict)
    words: frozenset[str] = frozenset()
    header: str = "Authorization"

    @property
    def opens(self) -> dict[str, str]:
        return self.with_secret(self.secret) if self.secret else {}

    def with_secret(self, secret: str) -> dict[str, str]:
        bare = self.header != "Authorization"
        return {self.header.replace("-", "_"): secret if bare else f"Bearer {secret}"}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def ask(target: Target, method: str, *, query: str = "", content: bytes = b"", **changes: str) -> Answer:
    """One request."""
    headers = {"Host": f"127.0.0.1:{target.port}", "Connection": "close", **target.more}
    headers |= {"Content-Length": str(len(content))} if content else {}
    headers |= {name.replace("_", "-"): value for name, value in changes.items()}
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    try:
        lines = [f"{method} {target.path}{query} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        async with asyncio.timeout(60):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    first, *rest = head.decode("latin-1").split("\r\n")
    found = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
    return Answer(int(first.split()[1]), found, body)


def filled(path: str, **places: str) -> str:
    """A path with something in its places."""
    known = {**dict.fromkeys(("eval_id", "index", "port"), "1"), **places}
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda m: known.get(m[1], "x"), path)


def words_of(handler: Callable[..., Any]) -> frozenset[str]:
    """The names that a handler reads of a query or a body, as its source says."""
    source, module = inspect.getsource(handler), sys.modules[handler.__module__]
    models = [getattr(module, next(filter(None, names))) for names in _READS.findall(source)]
    return frozenset([*(name for model in models for name in model.model_fields), *_WORDS.findall(source)])


def by_path(table: list[Row]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in table:
        found.setdefault(row[1], []).append(row)
    return found


def targets_of(
    table: list[Row], port: int, secret_of: Callable[[Any], str], places: dict[str, str] | None = None
) -> list[Target]:
    """The paths of a table. Those that end what the others need stand last."""
    found = [
        Target(
            port,
            filled(path, **(places or {})),
            frozenset(row[0] for row in rows),
            secret_of(rows[0]),
            words=frozenset().union(*(words_of(row[2]) for row in rows)),
        )
        for path, rows in by_path(table).items()
    ]
    return sorted(found, key=lambda target: "DELETE" in target.methods)


@contextlib.asynccontextmanager
async def inference_routes(tmp_path: Path) -> AsyncIterator[list[Target]]:
    letters = Tokenizer(models.BPE(vocab={chr(code): code for code in range(256)}, merges=[]))
    service = ModelService(Bridge(MockEngine()), Renderer(letters, None, ()), "policy")
    running = inference.InferenceServer(service, bind("127.0.0.1", 0), keys=KEYS)
    await running.start()
    secrets = {"anybody": "", "key": KEYS.api, "admin": KEYS.admin}
    yield targets_of(inference.ROUTES, running.port, lambda row: secrets[(*row, "key")[3]])
    await running.stop(0)


@contextlib.asynccontextmanager
async def sandbox_routes(tmp_path: Path) -> AsyncIterator[list[Target]]:
    """With one machine and one job, so that what is asked of them is looked at."""
    token = add_token(tmp_path / "tokens.json", "tester")
    settings = {"port": 0, "tokens_file": str(tmp_path / "tokens.json"), "spool_dir": str(tmp_path), "grace_s": 0}
    config = ServiceConfig.model_validate({**settings, "sandbox": {"backend": "unsafe", "warm": 0}})
    async with listening(config) as (service, url):
        port = int(url.rpartition(":")[2])
        machines = Target(port, f"{PREFIX}/machines", frozenset({"POST"}), token)
        machine = json.loads((await ask(machines, "POST", **machines.opens)).body)["id"]
        jobs = Target(port, f"{PREFIX}/machines/{machine}/jobs", frozenset({"POST"}), token)
        job = json.loads((await ask(jobs, "POST", content=b'{"command": "sleep 600"}', **jobs.opens)).body)["id"]
        secret_of = {path: "" for path in sandbox.OPEN} | {path: "the pass" for path in GATEWAY}
        service.passes[digest("the pass")] = Pass(service.tokens.holder(f"Bearer {token}"), machine, float("inf"))
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        upgrade["Sec-WebSocket-Key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
        places = {"id": machine, "job": job}
        yield [
            *(
                Target(port, filled(path, **places), frozenset({"GET"}), token, True, upgrade, words_of(handler))
                for path, handler in sandbox.WEBSOCKETS
            ),
            *targets_of(sandbox.ROUTES, port, lambda row: secret_of.get(row[1], token), places),
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


@contextlib.asynccontextmanager
async def training_routes(tmp_path: Path) -> AsyncIterator[list[Target]]:
    """With one key that is known."""
    shape = PolicyConfig(num_layers=1, hidden_size=32, mlp_size=32, num_heads=1, num_kv_heads=1, head_dim=32)
    (tmp_path / "keys").write_text("tml-the-key ann\n")
    base = write_policy(tmp_path / "org" / "tiny", shape)
    config = TrainServeConfig(base_model=base, data=tmp_path / "data", keys=tmp_path / "keys", port=0, device="cpu")
    async with training.serving(config) as url:
        port = int(url.rpartition(":")[2])
        open_paths = ("/healthz", "/telemetry", "/files/")
        # What a Hub alone may ask is closed without its keys: tests/hub/training_service.
        table = [row for row in training.ROUTES if row[3] != "admin"]
        targets = targets_of(
            table, port, lambda row: "" if any(word in row[1] for word in open_paths) else "tml-the-key"
        )
        yield [replace(target, header="X-API-Key") for target in targets]


@contextlib.asynccontextmanager
async def outside_routes(tmp_path: Path) -> AsyncIterator[list[Target]]:
    """The door for workers from outside, and what a worker hands on. What is said there must be signed, too."""
    config, nobody = OutsideConfig(folder=tmp_path), MockEngine()
    engine = OutsideEngine(
        MockEngine(), Auditor(lambda _: nobody), config, Roster(tmp_path), Serving(None, 0), bounds=AuditBounds(1e-4)
    )
    running = outside.OutsideDoor(engine, tmp_path, tmp_path, "run", "float32")
    await running.start(bind("127.0.0.1", 0))
    token = invite(tmp_path, "ann")
    port = free_port()
    relay = await outside.open_relay(PieceStore(), f"http://127.0.0.1:{port}")
    yield [
        *targets_of(running.routes(), int(running.base_url.rpartition(":")[2]), lambda row: token, {"version": "0"}),
        Target(port, "/pieces/x", frozenset({"GET"})),
    ]
    await relay.stop()
    await running.stop()
    await asyncio.to_thread(engine.close)
    nobody.close()


SERVERS = {
    "inference/outside/door.py": outside_routes,
    "inference/server.py": inference_routes,
    "sandbox/service/server.py": sandbox_routes,
    "hub/server.py": hub_routes,
    "envs/proxy/server.py": proxy_routes,
    "trainer/service/server.py": training_routes,
}
INSIDE_MACHINES = {
    "envs/python_worker.py": "asks for a secret: tests/envs/test_python_worker.py",
    "envs/rlm/bridge.py": "asks for a secret: tests/envs/rlm",
    "sandbox/containers/agent/boot.py": "TLS in which both ends show one certificate",
    "sandbox/containers/agent/ports.py": "a socket of the machine's network, handed to its owner",
    "sandbox/machines/egress.py": "a socket of the machine's network",
    "sandbox/zygote/machine.py": "a socket of the machine's network, handed to its owner",
    "sandbox/testing/ports.py": "runs in a machine, for the tests of backends",
    "runs/ports.py": "looks for a free port, and answers nobody",
    "runs/simulation/judging.py": "a simulated judge, on a socket that is bound to no address",
    "runs/simulation/sandboxes.py": "a simulated service, on a socket that is bound to no address",
}
