"""Samples over the wire: what is drawn, with which weights, and what is told of it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mettle.trainer.policy import model_config, write_tokenizer
from mettle.trainer.service.store import Store
from mettle.trainer.service.wire import messages
from mettle.trainer.service.wire.tensors import json_tensor

from .conftest import MINI, NAME, Refused, WireModel, datum, running

PROMPT = list(b"hello ")


async def base_sampler(wire):
    body = {"session_id": await wire.session(), "sampling_session_seq_id": 0, "base_model": NAME}
    return (await wire.post("create_sampling_session", **body))["sampling_session_id"]


async def promise_of(wire, sampler_id, number=1, *, prompt=PROMPT, num_samples=1, asked=None, **params):
    body = {"sampling_session_id": sampler_id, "seq_id": number, "num_samples": num_samples}
    chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
    params = {"max_tokens": 6, "seed": 3, **params}
    return await wire.post("asample", **body, prompt={"chunks": chunks}, sampling_params=params, **(asked or {}))


async def sample(wire, sampler_id, number=1, **more):
    return await wire.result(await promise_of(wire, sampler_id, number, **more))


async def trained(wire):
    """A model that is no longer the base."""
    model = await wire.model(rank=8)
    for _ in range(3):
        await model.send_pass([datum("hello world")])
        await model.step(0.05)
    return model


async def snapshot(model, number=0):
    return (await model.run("save_weights_for_sampler", sampling_session_seq_id=number))["sampling_session_id"]


async def test_logprobs_of_samples_are_those_of_forward_at_any_temperature(service):
    model = await trained(service())
    sampler = await snapshot(model)
    for number, params in enumerate(({}, {"temperature": 0.7}, {"top_p": 0.5}, {"temperature": 0.0}), start=1):
        found = await sample(model.wire, sampler, number, num_samples=2, **params)
        for sequence in found["sequences"]:
            ids = np.array(PROMPT + sequence["tokens"])
            whole = {"model_input": [{"encoded_text": {"tokens": ids[:-1].astype("<i4").tobytes()}}]}
            targets = messages.TensorMessage(dense=ids[1:].tobytes(), dtype=2, shape=[len(ids) - 1])
            weights = messages.TensorMessage(
                dense=np.ones(len(ids) - 1, "<f4").tobytes(), dtype=1, shape=[len(ids) - 1]
            )
            whole["loss_fn_inputs"] = {"target_tokens": targets, "weights": weights}
            passed = await model.run_pass([whole], is_forward_only=True)
            own = passed["loss_fn_outputs"][0]["logprobs"]["data"][len(PROMPT) - 1 :]
            np.testing.assert_allclose(sequence["logprobs"], own, atol=2e-5)


async def test_a_seed_gives_the_same_tokens_whoever_else_samples(service):
    wire = service()
    sampler = await base_sampler(wire)
    alone = await sample(wire, sampler, 1, num_samples=3)
    others = [promise_of(wire, sampler, n, seed=n, prompt=b"x" * n) for n in range(10, 18)]
    await asyncio.gather(*others)
    again = await sample(wire, sampler, 2, num_samples=3)
    tokens = [sequence["tokens"] for sequence in alone["sequences"]]
    assert [sequence["tokens"] for sequence in again["sequences"]] == tokens
    assert len({tuple(each) for each in tokens}) == 3


async def test_a_snapshot_stays_as_it_was_while_training_goes_on(service):
    model = await trained(service())
    sampler = await snapshot(model)
    before = await sample(model.wire, sampler, 1, asked={"prompt_logprobs": True})
    await model.send_pass([datum("goodbye")])
    await model.step(0.1)
    after = await sample(model.wire, sampler, 2, asked={"prompt_logprobs": True})
    newer = await sample(model.wire, await snapshot(model, 1), 1, asked={"prompt_logprobs": True})
    assert before == after
    assert before["prompt_logprobs"] != newer["prompt_logprobs"]


async def test_more_weights_than_places_take_turns(settings):
    async with running(settings(max_adapters=1)) as service:
        model = await trained(service())
        samplers = [await snapshot(model, 0), await snapshot(model, 1), await base_sampler(model.wire)]
        found = await asyncio.gather(*(sample(model.wire, each, n) for each in samplers for n in range(1, 4)))
        assert len(found) == 9


@pytest.fixture
def untied_model(tmp_path):
    """A base whose output head is its own, so that adapters may change it."""
    config = Qwen3Config(**{**model_config(MINI), "tie_word_embeddings": False})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        folder = tmp_path / "org" / "tiny"
        Qwen3ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, max_positions=1024)
    return folder


async def test_adapters_of_the_output_head_are_sampled_beside_the_base(settings, untied_model):
    async with running(settings(base_model=untied_model, max_samplers=1)) as service:
        model = await trained(service())
        samplers = [await snapshot(model, 0), await snapshot(model, 1)]
        found = await asyncio.gather(*(sample(model.wire, each, n) for each in samplers for n in range(1, 4)))
        assert len({str(each) for each in found}) == 1
        plain = await model.wire.model(number=0, rank=8, train_unembed=False)
        assert await sample(model.wire, await snapshot(plain)) != found[0]
        ids = np.array(PROMPT + found[0]["sequences"][0]["tokens"])
        scored = await sample(model.wire, samplers[0], 9, prompt=ids.tolist(), asked={"prompt_logprobs": True})
        np.testing.assert_allclose(scored["prompt_logprobs"][-6:], found[0]["sequences"][0]["logprobs"], atol=2e-5)


async def test_prompts_are_scored_as_they_were_asked_to_be(service):
    model = await trained(service())
    sampler = await snapshot(model)
    targets = np.array([[PROMPT[i + 1], -1] for i in range(len(PROMPT) - 1)])
    asked = {
        "prompt_logprobs": True, "topk_prompt_logprobs": 3, "target_prompt_logprobs": json_tensor(targets),
        "prompt_alt_tokens_k": 2, "topk_sample_logprobs": 2,
    }  # fmt: skip
    found = await sample(model.wire, sampler, asked=asked)
    own = found["prompt_logprobs"]
    assert own[0] is None
    scored = np.array(found["target_prompt_logprobs"]["data"]).reshape(-1, 2)
    np.testing.assert_allclose(scored[:, 0], own[1:], atol=2e-5)
    assert not scored[:, 1].any()
    rows = found["topk_prompt_logprobs"]
    assert rows[0] is None
    assert all(len(row) == 3 and row == sorted(row, key=lambda cell: -cell[1]) for row in rows[1:])
    assert found["prompt_alt_tokens"]["tokens"]["shape"] == [len(PROMPT) - 1, 2]
    assert [len(row) for row in found["sequences"][0]["topk_logprobs"]] == [2] * 6
    last = await sample(model.wire, sampler, 2, asked={"prompt_logprobs": True, "prompt_logprobs_last_n": 2})
    assert [value is None for value in last["prompt_logprobs"]] == [True] * 4 + [False] * 2


async def test_samples_stop_where_they_are_told_to(service):
    wire = service()
    sampler = await base_sampler(wire)
    whole = (await sample(wire, sampler, 1, max_tokens=12))["sequences"][0]
    assert (whole["stop_reason"], len(whole["tokens"])) == ("length", 12)
    stop_id = whole["tokens"][4]
    by_id = (await sample(wire, sampler, 2, max_tokens=12, stop=[stop_id]))["sequences"][0]
    first = whole["tokens"].index(stop_id)
    assert (by_id["stop_reason"], by_id["tokens"]) == ("stop", whole["tokens"][: first + 1])
    never = (await sample(wire, sampler, 3, max_tokens=12, stop=[]))["sequences"][0]
    assert never["tokens"] == whole["tokens"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 1000}, "num_samples"),
        ({"temperature": -1}, "temperature"),
        ({"prompt": []}, "no tokens"),
        ({"prompt": [99999]}, "token ids"),
        ({"prompt": [1] * 5000}, "5000 tokens"),
        ({"asked": {"record_stability_info": True}}, "stable_reinforce"),
        ({"asked": {"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}}, "target_prompt_logprobs"),
    ],
)
async def test_a_wrong_sample_fails_by_its_future(service, more, said):
    wire = service()
    with pytest.raises(Refused, match=said) as refused:
        await sample(wire, await base_sampler(wire), **more)
    assert refused.value.category == "user"


async def test_a_cancelled_sample_ends(service):
    wire = service()
    promise = await promise_of(wire, await base_sampler(wire), max_tokens=4000, stop=[])
    await wire.post("cancel_future", request_id=promise["request_id"])
    with pytest.raises(Refused, match="cancelled"):
        await wire.result(promise)


async def test_a_finished_session_takes_its_samples_with_it(service):
    wire = service()
    sampler = await base_sampler(wire)
    promise = await promise_of(wire, sampler, max_tokens=4000, stop=[])
    await wire.post(f"sessions/{sampler.partition(':')[0]}/finish", reason={"type": "success"})
    with pytest.raises(Refused, match="session has ended"):
        await wire.result(promise)


async def test_a_flood_is_held_back_and_hurts_nobody_else(settings):
    async with running(settings(max_waiting=5)) as service:
        flood, other = service("tml-flood"), await service("tml-ben").model()
        sampler = await base_sampler(flood)
        body = {"sampling_session_id": sampler, "num_samples": 1, "prompt": {"chunks": [{"tokens": PROMPT}]}}
        params = {"max_tokens": 500, "stop": []}
        asked = [
            flood.ask("POST", "asample", json={**body, "seq_id": n, "sampling_params": params}) for n in range(1, 60)
        ]
        answers = await asyncio.gather(*asked)
        statuses = [status for status, _ in answers]
        assert set(statuses) == {200, 429}
        assert (await other.run_pass([datum("hello world")]))["metrics"]
        for status, promise in answers:
            if status == 200:
                assert (await flood.result(promise))["sequences"]


async def test_neither_samples_nor_others_passes_wait_for_a_tenant_that_has_much_to_do(settings):
    """Whoever asks for little is served while the one who asked for much has work left."""
    config = settings(pass_tokens=512)
    async with running(config) as service:
        busy, other = await service("tml-busy").model(), await service("tml-ben").model()
        sampler = await base_sampler(other.wire)
        await sample(other.wire, sampler)
        for _ in range(12):
            await busy.send_pass([datum("hello world " * 40)] * 100)
        assert await sample(other.wire, sampler, 2)
        assert await other.run_pass([datum("hello world")])
        store = Store(config.data / "service.db")
        assert len(store.waiting()) >= 8
        store.database.close()


async def test_old_clients_are_not_told_of_kinds_that_they_do_not_know(service):
    model = await service().model()
    await model.run("save_weights_external", path="out")
    for version, count in (("0.16.1", 0), ("0.30.4", 1), ("99.0.0", 1)):
        headers = {"User-Agent": f"AsyncTinker/Python {version}"}
        _, found = await model.wire.ask("GET", "checkpoints", headers=headers)
        assert len(found["checkpoints"]) == count


async def test_an_adapter_in_the_archive_is_the_one_that_samples(service):
    model = await trained(service())
    saved = await model.run("save_weights_for_sampler", path="final")
    path = f"training_runs/{model.model_id}/checkpoints/sampler_weights/final/archive"
    status, _ = await model.wire.ask("GET", path, allow_redirects=False)
    assert status == 302
    nobody = WireModel(service(""), model.model_id)
    status, data = await model.wire.ask("GET", path)
    assert status == 200
    assert b"adapter_model.safetensors" in data
    assert (await nobody.wire.ask("GET", path))[0] == 401
    body = {"session_id": model.model_id.partition(":")[0], "sampling_session_seq_id": 7, "model_path": saved["path"]}
    sampler = (await model.wire.post("create_sampling_session", **body))["sampling_session_id"]
    assert await sample(model.wire, sampler) == await sample(model.wire, await snapshot(model, 8))
