"""Adapters over HTTP: loaded, listed, updated, pinned and unloaded, and what is refused before anything is served."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from policies import make_model, picked_logprobs, publish, publish_adapter, save_adapter, tiny_config, with_adapter
from schedulers import Heard, ask
from served import KEYS, served

from mettle.clients.renderer import Renderer
from mettle.inference.engine.mock import MockEngine
from mettle.inference.engine.protocol import RequestRefused, WeightsRejected
from mettle.inference.remote import RemoteEngine
from mettle.inference.server import InferenceServer


def root(server: InferenceServer) -> str:
    return server.base_url.removesuffix("/v1")


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    async with http.post(url, data=json.dumps(body)) as response:
        return response.status, await response.json()


async def models(http: aiohttp.ClientSession, server: InferenceServer) -> dict[str, Any]:
    async with http.get(f"{server.base_url}/models") as response:
        return {found["id"]: found for found in (await response.json())["data"]}


async def sample(http: aiohttp.ClientSession, server: InferenceServer, name: str) -> dict[str, Any]:
    body = {"model": name, "prompt_ids": [1, 2, 3], "max_tokens": 5, "seed": 1, "ignore_eos": True}
    status, answer = await post(http, f"{server.base_url}/generate", body)
    assert (status, answer["model"]) == (200, name)
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def agrees(choice: dict[str, Any], model: Any) -> bool:
    expected = picked_logprobs(model, [1, 2, 3, *choice["token_ids"]])[2:]
    return bool((torch.tensor(choice["logprobs"]) - expected).abs().mean() <= 1e-5)


async def test_an_adapter_is_loaded_listed_sampled_from_and_unloaded(
    server: InferenceServer, http: aiohttp.ClientSession, model: Any, tmp_path: Path
) -> None:
    folders = [save_adapter(model, tmp_path / str(i), seed=i) for i in range(2)]
    load, unload = f"{server.base_url}/load_lora_adapter", f"{server.base_url}/unload_lora_adapter"
    status, answer = await post(http, load, {"lora_name": "a", "lora_path": str(folders[0])})
    assert (status, answer["version"]) == (200, 0)
    status, answer = await post(http, load, {"lora_name": "a", "lora_path": str(folders[1])})
    assert (status, answer["error"]["param"], "load_inplace" in answer["error"]["message"]) == (400, "lora_name", True)
    again = {"lora_name": "a", "lora_path": str(folders[1]), "load_inplace": True}
    assert (await post(http, load, again))[1]["version"] == 1
    found = await models(http, server)
    assert list(found) == ["policy", "a"]
    about = found["a"]
    assert (about["policy_version"], about["versions"], about["parent"]) == (1, [0, 1], "policy")
    assert about["root"] == str(folders[1])
    merged = [with_adapter(model, folder) for folder in folders]
    newest, pinned, base = [await sample(http, server, name) for name in ("a", "a@v0", "policy")]
    assert (newest["versions"], pinned["versions"], base["versions"]) == ([1] * 5, [0] * 5, [0] * 5)
    assert agrees(newest, merged[1])
    assert agrees(pinned, merged[0])
    assert agrees(base, model)
    assert (await post(http, unload, {"lora_name": "a"}))[0] == 200
    assert (await post(http, unload, {"lora_name": "a"}))[0] == 404
    assert list(await models(http, server)) == ["policy"]
    status, answer = await post(http, f"{server.base_url}/generate", {"model": "a", "prompt_ids": [1]})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_published_adapter_is_served_once_its_canary_holds(
    server: InferenceServer, http: aiohttp.ClientSession, model: Any, policy_folder: Path, tmp_path: Path
) -> None:
    url = f"{root(server)}/admin/weights"
    folder = save_adapter(model, tmp_path / "a")
    published = publish_adapter(model, folder, policy_folder, tmp_path / "run", 3)
    status, answer = await post(http, url, {"adapter": "run", "version": 3, "path": str(published)})
    assert (status, answer["version"], answer["canary"]["num_tokens"]) == (200, 3, 25)
    assert answer["canary"]["mean_abs_diff"] < 1e-5
    assert agrees(await sample(http, server, "run@v3"), with_adapter(model, folder))
    wrong = publish_adapter(model, folder, policy_folder, tmp_path / "wrong", 4, canary_offset=0.01)
    status, answer = await post(http, url, {"adapter": "run", "version": 4, "path": str(wrong)})
    assert (status, answer["error"]["code"]) == (409, "weights_rejected")
    assert answer["canary"]["mean_abs_diff"] == pytest.approx(0.01, rel=1e-2)
    assert (await models(http, server))["run"]["versions"] == [3]
    async with http.get(f"{root(server)}/health") as response:
        assert (await response.json())["version"] == 0


async def test_what_is_no_adapter_of_this_base_is_refused_before_anything_is_served(
    server: InferenceServer,
    http: aiohttp.ClientSession,
    model: Any,
    other_model: Any,
    policy_folder: Path,
    tmp_path: Path,
) -> None:
    url = f"{root(server)}/admin/weights"
    good = save_adapter(model, tmp_path / "good")
    other_base = tmp_path / "base"
    other_model.save_pretrained(other_base)
    foreign = publish_adapter(model, good, other_base, tmp_path / "foreign", 1)
    whole = publish(other_model, tmp_path / "whole", 1)
    for path, version, reason in [
        (foreign, 1, "another base"),
        (whole, 1, "no adapter"),
        (publish_adapter(model, good, policy_folder, tmp_path / "run", 2), 1, "holds version 2"),
        (tmp_path / "nowhere", 1, "nowhere"),
        (good, 1, "manifest"),
    ]:
        status, answer = await post(http, url, {"adapter": "a", "version": version, "path": str(path)})
        assert (status, reason in answer["error"]["message"]) == (409, True), answer
    wide = save_adapter(make_model(tiny_config(hidden_size=64)), tmp_path / "wide")
    dora = save_adapter(model, tmp_path / "dora", use_dora=True)
    load = f"{server.base_url}/load_lora_adapter"
    for name, folder, reason in [
        ("a", wide, "another base"),
        ("a", dora, "use_dora"),
        ("a", tmp_path, "adapter_config.json"),
        ("policy", good, "the model itself"),
        ("a@v1", good, "lora_name"),
        ("", good, "lora_name"),
    ]:
        status, answer = await post(http, load, {"lora_name": name, "lora_path": str(folder)})
        assert (status, reason in json.dumps(answer["error"])) == (400, True), answer
        assert "\n" not in answer["error"]["message"]
    assert list(await models(http, server)) == ["policy"]


async def test_the_mock_engine_keeps_the_same_promises(
    mock_server: InferenceServer, http: aiohttp.ClientSession, model: Any, tmp_path: Path
) -> None:
    folder = save_adapter(model, tmp_path / "a")
    load = f"{mock_server.base_url}/load_lora_adapter"
    assert (await post(http, load, {"lora_name": "a", "lora_path": str(tmp_path)}))[0] == 400
    for _ in range(2):
        body = {"lora_name": "a", "lora_path": str(folder), "load_inplace": True}
        assert (await post(http, load, body))[0] == 200
    assert (await sample(http, mock_server, "a"))["versions"] == [1] * 3
    assert (await sample(http, mock_server, "a@v0"))["versions"] == [0] * 3
    assert (await post(http, f"{mock_server.base_url}/unload_lora_adapter", {"lora_name": "a"}))[0] == 200
    assert list(await models(http, mock_server)) == ["policy"]


def test_a_remote_engine_passes_adapters_on(renderer: Renderer, model: Any, tmp_path: Path) -> None:
    folder = save_adapter(model, tmp_path / "a")
    with served(MockEngine(), renderer) as base_url:
        engine = RemoteEngine(base_url, admin_key=KEYS.admin, api_key=KEYS.api)
        try:
            assert [engine.load_adapter("a", folder).version for _ in range(2)] == [0, 1]
            assert engine.load_adapter("a", folder, 7).version == 7
            (status,) = engine.status().adapters
            assert (status.name, status.path, status.versions) == ("a", str(folder), (0, 1, 7))
            heard = Heard()
            for request_id, version in (("newest", None), ("pinned", 1), ("gone", 5)):
                asked = ask(request_id, [1, 2])
                engine.submit(replace(asked, adapter="a", adapter_version=version), heard)
            wait_until(lambda: len(heard.generations) + len(heard.errors) == 3)
            versions = {found.request_id: found.choices[0].versions for found in heard.generations}
            assert versions == {"newest": [7, 7], "pinned": [1, 1]}
            assert isinstance(heard.errors[0], RequestRefused)
            with pytest.raises(WeightsRejected, match="adapter_config"):
                engine.load_adapter("b", tmp_path)
            engine.unload_adapter("a")
            assert engine.status().adapters == ()
        finally:
            engine.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in a minute"
        time.sleep(0.01)
