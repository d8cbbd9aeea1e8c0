"""Every route of every server, against everybody who should not be let in and every number that is none.

The routes are those that the servers themselves list, and the servers those that the sources open, so that a new one
of either cannot be forgotten.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from listening_servers import INSIDE_MACHINES, SERVERS, Target, ask

from mettle.inference import server as inference
from mettle.inference.bridge import Bridge
from mettle.inference.engine.mock import MockEngine
from mettle.inference.service import ModelService
from mettle.web.server import bind

SOURCES = Path(__file__).parents[2] / "src" / "mettle"
HUGE = str(1 << 42)
NO_NUMBERS = ("9" * 23, "-1e999")
NO_VALUES = ("9" * 23, "-1e999", '"\\ud800"', "[" + "9" * 23 + "]")
# Collectives know no secret. They meet in files of this user's and listen on the loopback interface, or on the address
# that a person has named: see `test_world.py` and `test_broadcast.py` for what they open.
BETWEEN_RANKS = {"trainer/world.py", "inference/engine/broadcast.py"}
# A port of a machine that its owner has opened to whoever reaches the address; see the module for what that means.
OPENED_BY_OWNERS = {"sandbox/service/exposures.py"}
# The workers of environments on another node: no HTTP, and nothing is read of who does not prove to have the run's key
# (`tests/envs/workers/test_places.py`).
BETWEEN_NODES = {"envs/workers/place.py"}
_OPENS = re.compile(
    r"\b(HttpServer|uvicorn\.(run|Server)|TCPSite|start_(unix_)?server|socket\.create_server)\("
    r"|\b(listener|sock|socket)\.listen\("
    r"|\b(init_process_group|TCPStore|create_device)\("
)


def test_every_server_is_in_the_table():
    found = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if _OPENS.search(path.read_text())}
    assert found == {*SERVERS, "web/server.py", *INSIDE_MACHINES, *BETWEEN_RANKS, *BETWEEN_NODES, *OPENED_BY_OWNERS}


@pytest.mark.parametrize("name", SERVERS)
async def test_no_route_lets_in_who_has_no_business_there(name: str, tmp_path: Path) -> None:
    async with SERVERS[name](tmp_path) as targets:
        assert len(targets) > 3
        for target in targets:
            for method in sorted(target.methods):
                await _is_closed(target, method)
            if not target.is_websocket:
                await _knows_its_methods(target)


@pytest.mark.parametrize("name", SERVERS)
async def test_no_number_is_too_large_for_an_answer(name: str, tmp_path: Path) -> None:
    """A field of a query or a body that holds what no field can is the asker's mistake. (The Hub has its own test.)"""
    async with SERVERS[name](tmp_path) as targets:
        for target in targets:
            for word in sorted(target.words):
                for method in sorted(target.methods):
                    await _knows_its_numbers(target, method, word)


async def _is_closed(target: Target, method: str) -> None:
    told = f"{method} {target.path}"
    assert (await ask(target, method, **target.opens, Host="evil.example")).status == 400, told
    for origin in ("https://evil.example", "null"):
        assert (await ask(target, method, **target.opens, Origin=origin)).status == 403, told
    if target.secret:
        wrong = "tml-wrong" if target.secret.startswith("tml-") else "wrong"
        for given in ({}, target.with_secret(wrong), {"Authorization": target.secret}):
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


async def _knows_its_numbers(target: Target, method: str, word: str) -> None:
    for value in NO_NUMBERS:
        told = (method, target.path, word, value)
        answer = await ask(target, method, query=f"?{word}={value}", **target.opens)
        assert answer.status < 500, (*told, answer.body[:300])
    if target.is_websocket or method == "GET":
        return
    for value in NO_VALUES:
        content = f'{{"{word}": {value}}}'.encode()
        answer = await ask(target, method, content=content, **target.opens)
        assert answer.status < 500, (method, target.path, content[:80], answer.body[:300])


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
