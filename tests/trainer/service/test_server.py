"""The service on a socket, by hand-made requests: what a client sees."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from mettle.trainer.service.wire import messages
from mettle.trainer.service.wire.tensors import json_tensor

from .conftest import NAME, Refused, WireModel, datum, running

DATA = [datum("hello world"), datum("goodbye")]


async def losses_of(model, num_steps=3, data=DATA):
    found = []
    for _ in range(num_steps):
        promise, stepped = (
            await model.send_pass(data),
            await model.send("optim_step", adam_params={"learning_rate": 1e-2}),
        )
        result = await model.wire.result(promise)
        found.append((result["metrics"]["loss:sum"], result["loss_fn_outputs"][0]["logprobs"]["data"]))
        await model.wire.result(stepped)
    return found


async def test_a_model_learns_what_it_is_trained_on(service):
    model = await service().model()
    losses = [loss for loss, _ in await losses_of(model, 8)]
    assert losses[-1] < 0.97 * losses[0]


async def test_json_and_protobuf_give_the_same_numbers(service):
    model = await service().model()
    by_message = await model.run_pass(DATA, is_forward_only=True)
    tokens = list(b"hello world")
    inputs = {"target_tokens": json_tensor(np.array(tokens[1:])), "weights": json_tensor(np.ones(10, "f4"))}
    chunks = [{"type": "encoded_text", "tokens": tokens[:-1]}]
    order = {"data": [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}], "loss_fn": "cross_entropy"}
    by_json = await model.run("forward", forward_input=order)
    logprobs = by_message["loss_fn_outputs"][0]["logprobs"]["data"]
    np.testing.assert_allclose(by_json["loss_fn_outputs"][0]["logprobs"]["data"], logprobs, atol=1e-5)
    packed = await model.wire.result(await model.send_pass(DATA, is_forward_only=True), "application/x-protobuf")
    record = messages.parse(messages.ForwardBackwardOutput, packed).loss_fn_outputs[0]
    assert np.frombuffer(record.fields["logprobs"].data, "<f4")[:10].tolist() == pytest.approx(logprobs, abs=0)


async def test_gradients_of_all_calls_since_the_step_add_up(service):
    wire = service()
    session = await wire.session()
    whole, halves = await wire.model(session, 0), await wire.model(session, 1)
    await whole.run_pass(DATA)
    for each in DATA:
        await halves.run_pass([each])
    norms = [(await model.step())["metrics"]["optim/grad_norm"] for model in (whole, halves)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    losses = [(await model.run_pass(DATA, is_forward_only=True))["metrics"]["loss:sum"] for model in (whole, halves)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
async def test_each_loss_of_the_api_trains(service, loss_fn):
    model = await service().model()
    length = len("hello world") - 1
    inputs = {"logprobs": np.full(length, -5.5), "advantages": np.linspace(-1, 1, length)}
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = np.ones(length)
    result = await model.run_pass([datum("hello world", **inputs)], loss_fn)
    assert np.isfinite(result["metrics"]["loss:sum"])
    assert (await model.step())["metrics"]["optim/grad_norm"] > 0


async def test_a_tenant_alone_and_between_seven_others_gets_the_same_bits(service):
    alone = await losses_of(await service().model(rank=4, seed=7))
    others = [await service(f"tml-{n}").model(rank=2 + n, seed=n) for n in range(7)]
    again = await service("tml-ben").model(rank=4, seed=7)
    found, *_ = await asyncio.gather(losses_of(again), *(losses_of(m, 3, [datum("something else")]) for m in others))
    assert found == alone


async def test_requests_run_by_number_whatever_order_they_come_in(service):
    model, twin = await service().model(), await service("tml-ben").model()
    for which in (model, twin):
        await which.run_pass(DATA)
    early = await model.send_pass(DATA, seq_id=3)
    stepped = await model.wire.post("optim_step", model_id=model.model_id, seq_id=2, adam_params={"learning_rate": 0.1})
    await model.wire.result(stepped)
    await twin.step(0.1)
    expected = await twin.run_pass(DATA)
    assert (await model.wire.result(early))["metrics"] == expected["metrics"]


async def test_a_number_that_never_comes_fails_what_waits_for_it_and_names_it(settings):
    async with running(settings(gap_s=0.3)) as service:
        model = await service().model()
        promise = await model.send_pass(DATA, seq_id=5)
        with pytest.raises(Refused, match="request 1 of this model did not come") as refused:
            await model.wire.result(promise)
        assert refused.value.category == "user"
        late = await model.send_pass(DATA, seq_id=1)
        with pytest.raises(Refused, match="came after"):
            await model.wire.result(late)
        assert await model.wire.result(await model.send_pass(DATA, seq_id=6))


async def test_the_same_request_sent_again_is_the_same_future(service):
    model = await service().model()
    first, again = await model.send_pass(DATA, seq_id=1), await model.send_pass(DATA, seq_id=1)
    assert first == again
    other = await model.send_pass(DATA[:1], seq_id=1)
    with pytest.raises(Refused, match="another content"):
        await model.wire.result(other)
    assert await model.wire.result(first) == await model.wire.result(again)


WRONG = [
    ({"loss_fn": "nonsense"}, "no loss 'nonsense'"),
    ({"loss_fn": "stable_reinforce"}, "no loss 'stable_reinforce'"),
    ({"loss_fn": "ppo"}, "lack logprobs"),
    ({"loss_fn": "cross_entropy", "config": {"beta": 1}}, "beta"),
    ({"data": []}, "no datum"),
    ({"data": [datum("x" * 5000)]}, "4999 tokens"),
    ({"data": [datum("ab", weights=[np.nan])]}, "not finite"),
    ({"data": [datum("abc", weights=[1.0])]}, "rows"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
async def test_bad_input_fails_by_its_future_and_the_model_goes_on(service, changes, said):
    model = await service().model()
    arguments = {"data": DATA} | changes
    with pytest.raises(Refused, match=said) as refused:
        await model.run_pass(arguments.pop("data"), **arguments)
    assert refused.value.category == "user"
    assert await model.step()


RECIPIENT = "age1v6vakcveu0g9c92knazd0rakx7vzfjqm3hl2lgzwef53ms4hee5q2ngh8r"
IMAGE = {
    "data": [{"model_input": {"chunks": [{"type": "image", "data": "", "format": "png"}]}, "loss_fn_inputs": {}}],
    "loss_fn": "cross_entropy",
}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("optim_step", {"adam_params": {"learning_rate": -1}}, "learning_rate"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "adamw"),
        ("save_weights", {"path": "../../etc"}, "name"),
        ("save_weights", {"path": "a", "ttl_seconds": 5}, "ttl_seconds"),
        ("load_weights", {"path": "tinker://nobody/weights/a", "optimizer": True}, "no weights"),
        ("forward_backward", {"forward_backward_input": 3}, "forward_backward_input"),
        ("save_weights_external", {"path": "a", "age_encryption_recipients": ["age1x"]}, "'age1x' is no public key"),
        ("save_weights_external", {"path": "a", "age_encryption_recipients": ["age1x"] * 33}, "at most 32"),
        ("save_weights", {"path": "a", "age_encryption_recipients": [RECIPIENT]}, "exports alone"),
        ("forward_backward", {"forward_backward_input": IMAGE}, r"data\[0\]: this server takes text; .* 'image'"),
    ],
)
async def test_a_wrong_request_uses_its_number_up(service, path, body, said):
    model = await service().model()
    with pytest.raises(Refused, match=said) as refused:
        await model.run(path, **body)
    assert refused.value.category == "user"
    assert await model.step()


async def test_a_flood_of_passes_is_held_back_and_none_is_lost(settings):
    """Also where what came first waits for a number that was held back: that one is let in."""
    async with running(settings(max_waiting=4)) as service:
        flood, other = await service("tml-flood").model(), await service("tml-ben").model()
        held_back, promises = [], {}

        async def send(number):
            while number not in promises:
                message = messages.ForwardBackwardRequest(
                    model_id=flood.model_id, seq_id=number, loss_fn="cross_entropy", data=DATA[:1]
                )
                status, answer = await flood.wire.ask(
                    "POST", "forward_backward", data=messages.encode(message),
                    headers={"Content-Type": "application/x-protobuf"},
                )  # fmt: skip
                if status == 200:
                    promises[number] = answer
                else:
                    assert status == 429, answer
                    held_back.append(number)
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(send(number) for number in range(2, 6)))  # all that may wait do, for number 1
        await asyncio.gather(*(send(number) for number in range(6, 41)), send(1))
        results = [await flood.wire.result(promises[number]) for number in range(1, 41)]
        assert held_back
        assert len({result["metrics"]["loss:sum"] for result in results}) == 1
        flood.last = 40
        await other.run_pass(DATA[:1])
        norms = [(await model.step())["metrics"]["optim/grad_norm"] for model in (flood, other)]
        assert norms[0] == pytest.approx(40 * norms[1], rel=1e-3)


async def test_what_was_accepted_is_answered_again_while_too_much_waits(settings):
    async with running(settings(max_waiting=1)) as service:
        model = await service().model()
        early = await model.send_pass(DATA, seq_id=2)
        assert await model.send_pass(DATA, seq_id=2) == early
        first = await model.send_pass(DATA, seq_id=1)
        for promise in (first, early):
            assert (await model.wire.result(promise))["metrics"]


async def test_an_export_is_encrypted_for_those_it_is_for(service, tmp_path):
    pyrage = pytest.importorskip("pyrage", reason="the extra 'service' has it")
    ours, other = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    model = await service().model()
    plain = await model.run("save_weights_external", path="plain")
    sealed = await model.run("save_weights_external", path="sealed", age_encryption_recipients=[str(ours.to_public())])
    files = {}
    for path in (plain["path"], sealed["path"]):
        run_id, segment, name = path.removeprefix("tinker://").split("/")
        where = f"training_runs/{run_id}/checkpoints/{segment}/{name}/external_weights_urls"
        _, links = await model.wire.ask("GET", where)
        for file, url in links["urls"].items():
            async with model.wire.http.get(url) as answer:
                files[file] = await answer.read()
    assert sorted(files) == sorted(
        f"{name}{end}" for name in ("adapter_config.json", "adapter_model.safetensors") for end in ("", ".age")
    )
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert pyrage.decrypt(files[f"{name}.age"], [ours]) == files[name]
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(files[f"{name}.age"], [other])
    with pytest.raises(Refused, match="encrypted for others"):
        await model.run("load_weights", path=sealed["path"], optimizer=False)


async def test_an_inflight_sampler_says_that_it_is_one_and_which_save_it_has(service):
    model = await service().model()
    for number in range(2):
        saved = await model.run("save_weights_for_sampler", sampling_session_seq_id=number, kind="inflight")
        _, found = await model.wire.ask("GET", f"samplers/{saved['sampling_session_id']}")
        assert (found["kind"], found["version"]) == ("inflight", number)
    saved = await model.run("save_weights_for_sampler", sampling_session_seq_id=2)
    assert (await model.wire.ask("GET", f"samplers/{saved['sampling_session_id']}"))[1]["kind"] == "snapshot"


async def test_a_loss_that_is_not_finite_leaves_no_gradient(service):
    wire = service()
    session = await wire.session()
    model, twin = await wire.model(session, 0), await wire.model(session, 1)
    await model.run_pass(DATA)
    await twin.run_pass(DATA)
    length = len("hello world") - 1
    endless = {"logprobs": np.full(length, -300.0), "advantages": np.ones(length)}
    with pytest.raises(Refused, match="the loss is"):
        await model.run_pass([datum("hello world", **endless)], "importance_sampling")
    assert (await model.step())["metrics"] == (await twin.step())["metrics"]


async def test_tenants_cannot_see_one_another(service):
    ann, ben = service("tml-ann"), service("tml-ben")
    model = await ann.model()
    saved = await model.run("save_weights", path="a")
    sampling = await model.run("save_weights_for_sampler", sampling_session_seq_id=0)
    promise = await model.send_pass(DATA)
    stolen = WireModel(ben, model.model_id, model.last)
    session_id = model.model_id.partition(":")[0]
    asked = [
        ("POST", "optim_step", {"model_id": model.model_id, "seq_id": 9}),
        ("POST", "get_info", {"model_id": model.model_id}),
        ("POST", "retrieve_future", {"request_id": promise["request_id"]}),
        ("POST", "weights_info", {"tinker_path": saved["path"]}),
        ("POST", "asample", {"sampling_session_id": sampling["sampling_session_id"], "seq_id": 1}),
        ("POST", "session_heartbeat", {"session_id": session_id}),
        ("POST", "create_model", {"session_id": session_id, "model_seq_id": 3, "base_model": NAME}),
        ("GET", f"training_runs/{model.model_id}", None),
        ("GET", f"samplers/{sampling['sampling_session_id']}", None),
        ("GET", f"training_runs/{model.model_id}/checkpoints/weights/a/archive", None),
        ("DELETE", f"training_runs/{model.model_id}/checkpoints/weights/a", None),
        ("GET", f"sessions/{session_id}", None),
    ]
    for method, path, body in asked:
        status, answer = await stolen.wire.ask(method, path, json=body, allow_redirects=False)
        assert status == 404, (path, status, answer)
    assert (await ben.ask("GET", "checkpoints"))[1]["checkpoints"] == []
    assert (await ben.ask("GET", "training_runs"))[1]["training_runs"] == []


@pytest.mark.parametrize("headers", [{"X-API-Key": ""}, {"X-API-Key": "sk-other"}])
async def test_without_a_key_nothing_is_told_but_that_it_is_up(service, headers):
    wire = service("")
    for path in ("create_session", "retrieve_future", "create_model"):
        assert (await wire.ask("POST", path, json={}, headers=headers))[0] == 401
    assert (await wire.ask("GET", "healthz", headers=headers))[1] == {"status": "ok"}
    assert (await wire.ask("POST", "telemetry", data=b"what?", headers=headers))[0] == 200


async def test_a_client_of_an_unknown_version_is_served(service):
    wire = service()
    body = {"sdk_version": "99.0.0", "tags": [], "user_metadata": None, "type": "create_session", "new_field": {"a": 1}}
    assert (await wire.post("create_session", **body))["session_id"]
    assert (await wire.post("client/config", sdk_version="99.0.0"))["pjwt_auth_enabled"] is False
