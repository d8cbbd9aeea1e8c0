"""The token route, the admin routes, and what happens to requests that are too many, cut off or in the way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from policies import END, make_model, picked_logprobs, publish, tiny_config

from mettle.clients.renderer import Renderer
from mettle.errors import UserError
from mettle.inference.bodies import GenerateBody
from mettle.inference.bridge import Bridge
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.embedded import EmbeddedEngine, start_engine
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.mock import MockEngine
from mettle.inference.server import ROUTES, InferenceServer
from mettle.inference.service import ModelService
from mettle.web.server import bind


def root(server: InferenceServer) -> str:
    return server.base_url.removesuffix("/v1")


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    async with http.post(url, data=body if isinstance(body, (str, bytes)) else json.dumps(body)) as response:
        return response.status, await response.json()


async def get_health(http: aiohttp.ClientSession, server: InferenceServer) -> dict[str, Any]:
    async with http.get(f"{root(server)}/health") as response:
        found: dict[str, Any] = await response.json()
        return found


async def until(condition: Any) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110  (what is awaited happens in the engine's thread)
            await asyncio.sleep(0.005)


def stops_before(engine: EmbeddedEngine, step: int, may_go_on: Callable[[], bool]) -> None:
    """From this step on the engine's thread waits, in the middle of what it samples, until it may go on.

    On a busy host it would be done with hundreds of tokens before anybody else has had a turn. What it is told to do
    between two steps is in its inbox, or has been done.
    """
    scheduler = engine._scheduler
    go = scheduler.step

    def wait_and_go(**options: bool) -> bool:
        deadline = time.monotonic() + 100
        while scheduler.totals.steps >= step and not may_go_on():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return go(**options)

    scheduler.step = wait_and_go  # type: ignore[method-assign]


async def test_tokens_in_tokens_out(server: InferenceServer, http: aiohttp.ClientSession, model: Any) -> None:
    body = {"prompt_ids": [1, 2, 3], "n": 3, "max_tokens": 6, "seed": 1, "ignore_eos": True, "prompt_logprobs": True}
    status, answer = await post(http, f"{server.base_url}/generate", body)
    assert status == 200
    assert set(answer) == {"request_id", "model", "prompt_tokens", "choices", "prompt_logprobs"}
    assert (answer["model"], answer["prompt_tokens"]) == ("policy", 3)
    assert answer["prompt_logprobs"][0] is None
    assert torch.allclose(torch.tensor(answer["prompt_logprobs"][1:]), picked_logprobs(model, [1, 2, 3]), atol=1e-4)
    for index, choice in enumerate(answer["choices"]):
        assert set(choice) == {"index", "token_ids", "logprobs", "versions", "finish_reason", "stop"}
        assert (choice["index"], choice["finish_reason"], choice["versions"]) == (index, "length", [0] * 6)
        expected = picked_logprobs(model, [1, 2, 3, *choice["token_ids"]])[2:]
        assert torch.allclose(torch.tensor(choice["logprobs"]), expected, atol=1e-4)


async def test_the_end_token_is_in_the_completion(http: aiohttp.ClientSession, renderer: Renderer) -> None:
    engine = MockEngine(lambda prompt, choice: [65, END])
    server = InferenceServer(ModelService(Bridge(engine), renderer, "policy"), bind("127.0.0.1", 0))
    await server.start()
    _, answer = await post(http, f"{server.base_url}/generate", {"prompt_ids": [1]})
    assert (answer["choices"][0]["token_ids"], answer["choices"][0]["finish_reason"]) == ([65, END], "stop")
    await server.stop(0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("{", None),
        ([1], None),
        ({}, "prompt_ids"),
        ({"prompt_ids": "abc"}, "prompt_ids"),
        ({"prompt_ids": [1, True]}, "prompt_ids"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [10**30]}, "prompt_ids"),
        ({"prompt_ids": [1], "max_tokens": -1}, "max_tokens"),
        ({"prompt_ids": [1], "min_p": 2}, "min_p"),
        ({"prompt_ids": [1], "stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"prompt_ids": [1], "temperature": float("nan")}, "temperature"),
    ],
)
async def test_bad_bodies_are_refused(
    mock_server: InferenceServer, http: aiohttp.ClientSession, body: Any, param: Any
) -> None:
    status, answer = await post(http, f"{mock_server.base_url}/generate", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_no_number_in_a_request_ends_the_engine(server: InferenceServer, http: aiohttp.ClientSession) -> None:
    """Every field of a generation with values that it cannot have, or that no tensor can hold."""
    for field in GenerateBody.model_fields:
        for value in ("9" * 23, "9" * 18, "-1", "1e308", "1e-300", "[" + "9" * 23 + "]", '["\\ud800"]'):
            rest = {"prompt_ids": [5], "max_tokens": 2}
            rest.pop(field, None)
            body = f'{json.dumps(rest)[:-1]}{", " if rest else ""}"{field}": {value}}}'
            async with http.post(f"{server.base_url}/generate", data=body) as answer:
                assert answer.status < 500, (body, await answer.text())
    assert server.service.engine.status().is_alive


async def test_unknown_routes_and_methods_answer_in_json(
    mock_server: InferenceServer, http: aiohttp.ClientSession
) -> None:
    assert (await post(http, f"{root(mock_server)}/nowhere", {}))[0] == 404
    async with http.get(f"{mock_server.base_url}/generate") as response:
        assert (response.status, "error" in await response.json()) == (405, True)


async def test_tokenize_and_back(mock_server: InferenceServer, http: aiohttp.ClientSession) -> None:
    url = root(mock_server)
    _, plain = await post(http, f"{url}/tokenize", {"prompt": "hé"})
    assert (plain["tokens"], plain["count"], plain["max_model_len"]) == ([104, 0xC3, 0xA9], 3, 256)
    _, chat = await post(http, f"{url}/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert chat["tokens"] == [259, 97, END, 260]
    assert (await post(http, f"{url}/detokenize", {"tokens": chat["tokens"]}))[1] == {
        "prompt": "<|user|>a<|end|><|assistant|>"
    }
    assert (await post(http, f"{url}/detokenize", {"tokens": [-1]}))[0] == 400


async def test_a_full_queue_says_so_and_recovers(http: aiohttp.ClientSession, renderer: Renderer) -> None:
    engine = MockEngine(limits=Limits(2, 64), max_queue=1)
    server = InferenceServer(ModelService(Bridge(engine), renderer, "policy"), bind("127.0.0.1", 0))
    await server.start()
    engine.hold()
    url = f"{server.base_url}/generate"
    held = [asyncio.create_task(post(http, url, {"prompt_ids": [i]})) for i in range(3)]
    await until(lambda: engine.status().num_waiting == 3)
    async with http.post(url, json={"prompt_ids": [9]}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert (await response.json())["error"]["code"] == "queue_full"
    engine.release()
    assert [status for status, _ in await asyncio.gather(*held)] == [200] * 3
    assert (await post(http, url, {"prompt_ids": [9]}))[0] == 200
    await server.stop(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(
    mock_engine: MockEngine, mock_server: InferenceServer, http: aiohttp.ClientSession, stream: bool
) -> None:
    mock_engine.hold()
    body = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    asking = asyncio.create_task(post(http, f"{mock_server.base_url}/chat/completions", body))
    await until(lambda: mock_engine.status().num_waiting == 1)
    asking.cancel()
    await until(lambda: len(mock_engine.aborted) == 1)


async def test_a_client_that_goes_away_in_mid_stream_aborts_its_request(
    server: InferenceServer, http: aiohttp.ClientSession
) -> None:
    engine = server.service.engine
    assert isinstance(engine, EmbeddedEngine)
    stops_before(engine, 3, lambda: engine.status().total_aborted == 1 or not engine._inbox.empty())
    body = {"prompt": [1], "max_tokens": 250, "stream": True, "ignore_eos": True, "n": 8}
    response = await http.post(f"{server.base_url}/completions", json=body)
    assert (await response.content.readline()).startswith(b"data: ")
    response.close()
    await until(lambda: engine.status().total_aborted == 1)
    await until(lambda: engine.status().num_running == 0)


async def test_an_update_under_running_requests_shows_in_their_versions(
    server: InferenceServer, http: aiohttp.ClientSession, other_model: Any, tmp_path: Path
) -> None:
    folder = publish(other_model, tmp_path, 1)
    engine = server.service.engine
    assert isinstance(engine, EmbeddedEngine)
    stops_before(engine, 6, lambda: engine.status().version == 1 or not engine._inbox.empty())
    body = {"prompt_ids": [1, 2, 3], "n": 4, "max_tokens": 120, "ignore_eos": True}
    asking = asyncio.create_task(post(http, f"{server.base_url}/generate", body))
    await until(lambda: engine.status().total_steps > 5)
    status, update = await post(http, f"{root(server)}/admin/weights", {"version": 1, "path": str(folder)})
    assert (status, update["version"]) == (200, 1)
    assert update["canary"]["mean_abs_diff"] < 1e-5
    assert update["canary"]["num_tokens"] == 25
    assert update["load_ms"] > 0
    _, answer = await asking
    for choice in answer["choices"]:
        versions = choice["versions"]
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
    assert (await get_health(http, server))["version"] == 1
    _, after = await post(http, f"{server.base_url}/generate", {"prompt_ids": [1, 2], "max_tokens": 5})
    choice = after["choices"][0]
    expected = picked_logprobs(other_model, [1, 2, *choice["token_ids"]])[1:]
    assert torch.allclose(torch.tensor(choice["logprobs"]), expected, atol=1e-4)


async def test_weights_that_do_not_reproduce_their_canary_are_refused(
    server: InferenceServer, http: aiohttp.ClientSession, other_model: Any, model: Any, tmp_path: Path
) -> None:
    folder = publish(other_model, tmp_path, 1, canary_offset=0.01)
    status, answer = await post(http, f"{root(server)}/admin/weights", {"version": 1, "path": str(folder)})
    assert (status, answer["error"]["code"]) == (409, "weights_rejected")
    assert answer["canary"]["mean_abs_diff"] == pytest.approx(0.01, rel=1e-2)
    assert (await get_health(http, server))["version"] == 0
    _, after = await post(http, f"{server.base_url}/generate", {"prompt_ids": [1, 2], "max_tokens": 5})
    choice = after["choices"][0]
    assert torch.allclose(
        torch.tensor(choice["logprobs"]), picked_logprobs(model, [1, 2, *choice["token_ids"]])[1:], atol=1e-4
    )


async def test_other_unusable_weights_are_refused_too(
    server: InferenceServer, http: aiohttp.ClientSession, other_model: Any, tmp_path: Path
) -> None:
    url = f"{root(server)}/admin/weights"
    folder = publish(other_model, tmp_path, 1)
    wide = publish(make_model(tiny_config(hidden_size=64)), tmp_path / "wide", 1)
    torn = publish(other_model, tmp_path / "torn", 1)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    broken = publish(other_model, tmp_path / "broken", 1)
    (broken / "canary.npz").write_bytes(b"nothing")
    for body, reason in [
        ({"version": 2, "path": str(folder)}, "holds version 1"),
        ({"version": 1, "path": str(tmp_path / "nowhere")}, "nowhere"),
        ({"version": 1, "path": str(wide)}, "shape"),
        ({"version": 1, "path": str(torn)}, "safetensors"),
        ({"version": 1, "path": str(broken)}, "canary"),
    ]:
        status, answer = await post(http, url, body)
        assert (status, reason in answer["error"]["message"]) == (409, True), answer
    assert (await post(http, url, {"version": 1}))[1]["error"]["param"] == "path"
    assert (await post(http, url, {"path": str(folder)}))[1]["error"]["param"] == "version"
    assert (await get_health(http, server))["version"] == 0
    assert (await post(http, url, {"version": 1, "path": str(folder)}))[0] == 200


async def test_pausing_keeps_requests_and_draining_finishes_them(
    server: InferenceServer, http: aiohttp.ClientSession
) -> None:
    url, engine = root(server), server.service.engine
    assert isinstance(engine, EmbeddedEngine)
    stops_before(
        engine, 3, lambda: not (engine._is_admitting and engine._inbox.empty()) or engine.status().total_steps > 3
    )
    await post(http, f"{url}/admin/pause", {"mode": "keep"})
    body = {"prompt_ids": [1], "max_tokens": 200, "ignore_eos": True}
    first = asyncio.create_task(post(http, f"{server.base_url}/generate", body))
    await until(lambda: engine.status().num_waiting == 1)
    assert (await get_health(http, server))["paused"] is True
    await post(http, f"{url}/admin/resume", {})
    await until(lambda: engine.status().num_running == 1)
    assert (await post(http, f"{url}/admin/pause?mode=drain", {}))[1] == {"paused": True, "mode": "drain"}
    assert engine.status().num_running == 0
    assert (await first)[0] == 200
    second = asyncio.create_task(post(http, f"{server.base_url}/generate", body))
    await until(lambda: engine.status().num_waiting == 1)
    await post(http, f"{url}/admin/resume", {})
    assert (await second)[0] == 200
    assert (await post(http, f"{url}/admin/pause", {"mode": "never"}))[0] == 400


def test_the_documentation_names_every_route() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "inference.md").read_text()
    named = {f"`{method} {path.replace(':path', '')}`" for method, path, *_ in ROUTES}
    assert {line.split("|")[1].strip() for line in page.splitlines() if line.startswith(("| `POST", "| `GET"))} == named


async def test_health_and_metrics(server: InferenceServer, http: aiohttp.ClientSession) -> None:
    await post(http, f"{server.base_url}/generate", {"prompt_ids": [1, 2], "max_tokens": 3, "ignore_eos": True})
    assert await get_health(http, server) == {
        "status": "ok",
        "version": 0,
        "model": "policy",
        "running": 0,
        "waiting": 0,
        "paused": False,
        "kv_bytes": 128 * 512,
        "kv_budget_bytes": 2 * 9 * 256 * 512,
        "preempted": 0,
        "dtype": "float32",
        "canary_tolerance": 1e-3,
    }
    async with http.get(f"{root(server)}/metrics") as response:
        figures = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if not line.startswith("#"))
    assert float(figures["mettle_inference_prompt_tokens_total"]) == 2
    assert float(figures["mettle_inference_sampled_tokens_total"]) == 3
    assert float(figures['mettle_inference_request_seconds_bucket{le="+Inf"}']) == 1


async def test_a_stopping_server_gives_running_requests_their_time(
    mock_engine: MockEngine, mock_server: InferenceServer, http: aiohttp.ClientSession
) -> None:
    mock_engine.hold()
    asking = asyncio.create_task(post(http, f"{mock_server.base_url}/generate", {"prompt_ids": [1]}))
    await until(lambda: mock_engine.status().num_waiting == 1)
    stopping = asyncio.create_task(mock_server.stop(20))
    await until(lambda: mock_server.service.is_stopping)
    assert (await post(http, f"{mock_server.base_url}/generate", {"prompt_ids": [2]}))[0] == 503
    mock_engine.release()
    assert (await asking)[0] == 200
    await stopping


async def test_an_engine_that_fails_fails_its_requests_and_is_reported(
    policy_folder: Path, renderer: Renderer, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[Exception] = []
    engine = start_engine(InferenceConfig(model=policy_folder, max_slots=4), on_death=deaths.append)
    server = InferenceServer(ModelService(Bridge(engine), renderer, "policy"), bind("127.0.0.1", 0))
    await server.start()

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory for keys")

    monkeypatch.setattr("mettle.inference.engine.slots.SlotCache.place", fail)
    status, answer = await post(http, f"{server.base_url}/generate", {"prompt_ids": [1], "ignore_eos": True})
    assert (status, "no memory for keys" in answer["error"]["message"]) == (500, True)
    await until(lambda: deaths)
    assert [type(error).__name__ for error in deaths] == ["ServiceError"]
    assert (await post(http, f"{server.base_url}/generate", {"prompt_ids": [1]}))[0] == 503
    assert (await get_health(http, server))["status"] == "stopping"
    await server.stop(0)


def test_an_engine_starts_from_published_weights_only_if_their_canary_holds(
    policy_folder: Path, other_model: Any, tmp_path: Path
) -> None:
    good = publish(other_model, tmp_path, 3)
    engine = start_engine(InferenceConfig(model=policy_folder, weights=good, version=3))
    assert isinstance(engine, EmbeddedEngine)
    assert engine.status().version == 3
    engine.close()
    bad = publish(other_model, tmp_path, 4, canary_offset=1.0)
    with pytest.raises(UserError, match="cannot be started from"):
        start_engine(InferenceConfig(model=policy_folder, weights=bad, version=4))
