"""States on disk: a kill at any moment loses no operation and doubles no step; a load goes on bit for bit."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys

import aiohttp
import pytest
from tests.forking import Nursery, forked_processes

from mettle.runs.ports import free_port
from mettle.trainer.service import models as models_module
from mettle.trainer.service.store import Store

from .conftest import Refused, Wire, WireModel, datum, running

DATA = [datum("hello world"), datum("goodbye")]
NUM_STEPS = 6
LONG = [[datum(f"{n} hello world " * 30) for n in range(24)], [datum("goodbye " * 40)] * 12]
"""Several passes each, so that a kill comes in the middle of one."""


@pytest.fixture(scope="module")
def _forked_services():
    """Services begin with torch imported: from a fork that was made while there was no event loop."""
    importlib.import_module("mettle.cli.main")
    with forked_processes("mettle.cli"), pytest.MonkeyPatch.context() as patch:
        nursery = Nursery()
        patch.setattr(Nursery, "here", nursery)
        yield
        nursery.close()


async def start(settings, port):
    config = settings(port=port)
    chosen = {"base_model": config.base_model, "data": config.data, "port": port, "poll_s": config.poll_s}
    words = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "mettle.cli", "train", "serve", *words, "--device", config.device,
        stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert child.stdout is not None
    told = re.search(r"http://\S+", (await child.stdout.readline()).decode())
    assert told, "the service did not come up"
    return child, told[0]


def waiting_in(data):
    store = Store(data / "service.db")
    try:
        return len(store.waiting())
    finally:
        store.database.close()


async def uninterrupted(settings):
    async with running(settings()) as service:
        model = await service().model(seed=5)
        return [await one_step(model, step, LONG) for step in range(NUM_STEPS)]


async def one_step(model, step, data=tuple([each] for each in DATA)):
    passed = await model.run_pass(data[step % 2])
    stepped = await model.step()
    return passed["metrics"]["loss:sum"], stepped["metrics"]["optim/grad_norm"]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("_forked_services")
@pytest.mark.parametrize(
    "kills", [pytest.param((3,), id="one"), pytest.param((1, 2, 5, 7, 9), id="five", marks=pytest.mark.nightly)]
)
async def test_kills_lose_no_operation_and_double_no_step(settings, tmp_path, kills):
    """All steps are sent ahead; the service is killed when a few of them have been told."""
    expected = await uninterrupted(lambda **more: settings(data=tmp_path / "other", **more))
    port = free_port()
    async with aiohttp.ClientSession() as http:
        child, url = await start(settings, port)
        model = await Wire(http, url, "tml-ann").model(seed=5)
        promises = []
        for step in range(NUM_STEPS):
            promises.append(await model.send_pass(LONG[step % 2]))
            promises.append(await model.send("optim_step", adam_params={"learning_rate": 1e-2}))
        results = []
        for number, promise in enumerate(promises):
            if number in kills:
                child.send_signal(signal.SIGKILL)
                await child.wait()
                assert waiting_in(tmp_path / "data") > 0, "the kill came in the middle of the work"
                child, _ = await start(settings, port)
            results.append(await model.wire.result(promise))
        for promise, result in zip(promises, results, strict=True):
            assert await model.wire.result(promise) == result
        child.terminate()
        await child.wait()
    losses = [result["metrics"]["loss:sum"] for result in results[::2]]
    norms = [result["metrics"]["optim/grad_norm"] for result in results[1::2]]
    assert list(zip(losses, norms, strict=True)) == expected


async def test_a_start_takes_up_gradients_that_no_snapshot_has(settings):
    async with running(settings()) as service:
        model = await service().model(seed=5)
        for step in range(2):
            await one_step(model, step)
        await model.run_pass(DATA)
    async with running(settings()) as service:
        again = WireModel(service(), model.model_id, model.last)
        found = await again.step()
    async with running(settings()) as service:
        twin = await service("tml-ben").model(seed=5)
        for step in range(2):
            await one_step(twin, step)
        await twin.run_pass(DATA)
        assert await twin.step() == found


async def test_a_state_that_is_loaded_takes_the_same_next_step(settings):
    async with running(settings()) as service:
        model = await service().model(seed=5)
        for step in range(3):
            await one_step(model, step)
        saved = await model.run("save_weights", path="three")
        ahead = [await one_step(model, step) for step in range(3)]
        await model.run("load_weights", path=saved["path"], optimizer=True)
        assert [await one_step(model, step) for step in range(3)] == ahead
        session = model.model_id.partition(":")[0]
        body = {"session_id": session, "model_seq_id": 9, "path": saved["path"], "optimizer": True}
        made = await model.wire.result(await model.wire.post("load_weights", **body))
        other = WireModel(model.wire, made["model_id"])
        assert other.model_id == f"{session}:train:9"
        assert [await one_step(other, step) for step in range(3)] == ahead
        body |= {"model_seq_id": 10, "optimizer": False}
        fresh = WireModel(
            model.wire, (await model.wire.result(await model.wire.post("load_weights", **body)))["model_id"]
        )
        first = await one_step(fresh, 0)
        assert first == ahead[0]
        assert await one_step(fresh, 1) != ahead[1]


async def test_models_that_make_room_come_back_as_they_were(settings, monkeypatch):
    async with running(settings()) as service:
        twin = await service("tml-ben").model(seed=5)
        expected = [await one_step(twin, step) for step in range(4)]
    monkeypatch.setattr(models_module, "MAX_IN_MEMORY", 1)
    async with running(settings()) as service:
        models = [await service(f"tml-{n}").model(seed=5) for n in range(3)]
        found = [[await one_step(model, step) for model in models] for step in range(4)]
    assert found == [[each] * 3 for each in expected]


async def test_a_damaged_state_fails_its_own_model_alone(settings):
    async with running(settings()) as service:
        model, other = await service().model(), await service("tml-ben").model()
        await one_step(model, 0)
    (snapshot,) = (settings().data / "states").glob("*/optimizer.safetensors")
    snapshot.write_bytes(b"damaged")
    async with running(settings()) as service:
        with pytest.raises(Refused, match="cannot be read") as refused:
            await WireModel(service(), model.model_id, model.last).run_pass(DATA)
        assert refused.value.category == "server"
        assert await WireModel(service("tml-ben"), other.model_id, other.last).run_pass(DATA)


async def test_names_are_taken_once_unless_they_may_be_overwritten(settings):
    async with running(settings()) as service:
        model = await service().model()
        await model.run("save_weights", path="a")
        with pytest.raises(Refused, match="already"):
            await model.run("save_weights", path="a")
        await model.run("save_weights", path="a", overwrite=True)
        _, found = await model.wire.ask("GET", f"training_runs/{model.model_id}/checkpoints")
        assert [each["checkpoint_id"] for each in found["checkpoints"]] == ["weights/a"]
        status, _ = await model.wire.ask("DELETE", f"training_runs/{model.model_id}/checkpoints/weights/a")
        assert status == 204
        with pytest.raises(Refused, match="no weights"):
            await model.run("load_weights", path=f"tinker://{model.model_id}/weights/a", optimizer=False)
