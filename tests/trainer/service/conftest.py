"""A service on a tiny random model, and a client that speaks its wire format by hand."""

from __future__ import annotations

from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
import torch

from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig
from mettle.trainer.service.config import TrainServeConfig
from mettle.trainer.service.server import serving
from mettle.trainer.service.wire import messages
from mettle.trainer.service.wire.tensors import tensor_message

MINI = PolicyConfig(num_layers=2, hidden_size=32, mlp_size=48, num_heads=2, num_kv_heads=1, head_dim=16)
NAME = "org/tiny"

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("base") / "org" / "tiny", MINI)


@pytest.fixture
def settings(tiny_model, tmp_path):
    def make(**changes):
        given = {"base_model": tiny_model, "data": tmp_path / "data", "port": 0, "poll_s": 5.0, "device": "cpu"}
        return TrainServeConfig(**(given | changes))

    return make


@pytest.fixture
async def service(settings):
    async with serving(settings()) as url, aiohttp.ClientSession() as http:
        yield lambda key="tml-ann": Wire(http, url, key)


@asynccontextmanager
async def running(config):
    """A service of its own for a test that stops and starts it."""
    async with serving(config) as url, aiohttp.ClientSession() as http:
        yield lambda key="tml-ann": Wire(http, url, key)


class Refused(Exception):
    """A future that failed; `category` as the service says it."""

    def __init__(self, body):
        super().__init__(body["error"])
        self.category = body["category"]


class Wire:
    """A client of one key."""

    def __init__(self, http, url, key):
        self.http, self.url, self.headers = http, url, {"X-API-Key": key}

    async def ask(self, method, path, **more):
        """(status, body) of one request."""
        headers = self.headers | more.pop("headers", {})
        async with self.http.request(method, f"{self.url}/api/v1/{path}", headers=headers, **more) as answer:
            data = await answer.read()
            is_json = answer.headers.get("Content-Type", "").startswith("application/json")
            return answer.status, await answer.json() if is_json else data

    async def post(self, path, /, **body):
        """The body of an answer with status 200."""
        status, answer = await self.ask("POST", path, json=body)
        assert status == 200, (status, answer)
        return answer

    async def result(self, promise, accept="application/json"):
        """What comes of a promise."""
        while True:
            body = {"request_id": promise["request_id"], "allow_metadata_only": False}
            status, answer = await self.ask("POST", "retrieve_future", json=body, headers={"Accept": accept})
            if status == 408:
                assert answer["type"] == "try_again"
                continue
            assert status == 200, (status, answer)
            if isinstance(answer, dict) and "error" in answer:
                raise Refused(answer)
            return answer

    async def session(self):
        body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0", "type": "create_session"}
        return (await self.post("create_session", **body))["session_id"]

    async def model(self, session_id=None, number=0, *, rank=4, seed=1, **lora):
        """A new model."""
        session_id = session_id or await self.session()
        body = {"session_id": session_id, "model_seq_id": number, "base_model": NAME, "type": "create_model"}
        promise = await self.post("create_model", **body, lora_config={"rank": rank, "seed": seed, **lora})
        return WireModel(self, (await self.result(promise))["model_id"])


class WireModel:
    """A model, with the number of its last request."""

    def __init__(self, wire, model_id, last=0):
        self.wire, self.model_id, self.last = wire, model_id, last

    async def send(self, path, /, **body):
        """The promise of the next request."""
        self.last += 1
        return await self.wire.post(path, model_id=self.model_id, seq_id=self.last, **body)

    async def send_pass(self, data, loss_fn="cross_entropy", *, config=(), is_forward_only=False, seq_id=None):
        """The same of a forward or forward_backward in protobuf."""
        if seq_id is None:
            self.last = seq_id = self.last + 1
        message = messages.ForwardBackwardRequest(
            model_id=self.model_id, seq_id=seq_id, loss_fn=loss_fn, data=data, forward_only=is_forward_only,
            loss_fn_config=dict(config),
        )  # fmt: skip
        headers = {"Content-Type": "application/x-protobuf"}
        body = messages.encode(message)
        status, answer = await self.wire.ask("POST", "forward_backward", data=body, headers=headers)
        assert status == 200, answer
        return answer

    async def run(self, path, /, **body):
        """The result of the next request."""
        return await self.wire.result(await self.send(path, **body))

    async def step(self, lr=1e-2):
        return await self.run("optim_step", adam_params={"learning_rate": lr})

    async def run_pass(self, data, loss_fn="cross_entropy", **more):
        return await self.wire.result(await self.send_pass(data, loss_fn, **more))


def datum(text, **inputs):
    """A datum that predicts a text; weights of 1 unless there are other inputs."""
    ids = np.array(list(text.encode()))
    if not inputs:
        inputs = {"weights": np.ones(len(ids) - 1)}
    arrays = {name: np.asarray(value, "<f4") for name, value in inputs.items()} | {"target_tokens": ids[1:]}
    return {
        "model_input": [{"encoded_text": {"tokens": ids[:-1].astype("<i4").tobytes()}}],
        "loss_fn_inputs": {name: tensor_message(array) for name, array in arrays.items()},
    }
