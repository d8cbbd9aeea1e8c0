"""The training service under the Hub's port: who may ask, what the process hears, and what comes back."""

import os

import aiohttp
import pytest
from tests.trainer.service.conftest import Refused, Wire, datum

from mettle.hub.accounts import people
from mettle.hub.training import usage
from mettle.hub.training_service import proxy as proxies
from mettle.hub.training_service.offers import ServiceState, offers_of, write_state
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig
from mettle.trainer.service.config import TrainServeConfig
from mettle.trainer.service.server import serving
from mettle.web.keys import Keys
from mettle.web.server import HttpServer, bind, url_of

AT = "/train/small/api/v1/"
MINI = PolicyConfig(num_layers=2, hidden_size=32, mlp_size=48, num_heads=2, num_kv_heads=1, head_dim=16)


def key_of(hub, slug, *scopes):
    return "tml-" + hub.token(slug, *(scopes or ("training:write",)))


@pytest.fixture
def bob(hub, services):
    client = hub.anonymous()
    client.headers["X-API-Key"] = key_of(hub, "bob")
    return client


def id_of(hub, slug):
    with hub.lab.database.read() as c:
        return people.find_person(c, slug).id


def set_quota(hub, slug, tokens):
    person = id_of(hub, slug)
    with hub.lab.database.write() as c:
        usage.set_quota(c, person, tokens)


def test_the_process_hears_whose_a_request_is_from_the_hub_alone(hub, bob):
    lies = {"X-Mettle-Owner": "somebody", "X-Mettle-Root": "http://evil", "X-Mettle-Refusal": "no", "Cookie": "a=b"}
    told = bob.post(AT + "create_session?x=1", json={"tags": []}, headers=lies).json()
    headers = {name.lower(): value for name, value in told["headers"].items()}
    assert headers["x-mettle-owner"] == id_of(hub, "bob")
    assert headers["x-mettle-root"] == "http://hub.test/train/small"
    assert not {"x-mettle-refusal", "cookie", "x-api-key"} & set(headers)
    assert (told["path"], told["method"], told["body"]) == ("/api/v1/create_session?x=1", "POST", '{"tags":[]}')
    assert told["config"]["name"] == "org/small"
    assert (told["config"]["max_rank"], told["config"]["host"]) == (8, "127.0.0.1")


def test_paths_statuses_and_large_answers_come_as_they_are(bob):
    path = AT + "training_runs/s-1:train:0/checkpoints/weights/a%2Fb"
    assert bob.delete(path).json()["path"].endswith("s-1:train:0/checkpoints/weights/a%2Fb")
    answer = bob.get(AT + "teapot")
    assert answer.status_code == 418
    assert "set-cookie" not in answer.headers
    large = bob.get(AT + "large")
    assert (len(large.content), large.headers["content-type"]) == (5 << 20, "application/x-tar")
    streamed = bob.post(AT + "forward", content=(b"x" * 1000 for _ in range(3)))
    assert streamed.json()["body"] == "x" * 3000


def test_who_has_no_token_for_it_is_told_what_is_wanted(hub, bob):
    for key, status, words in (
        ("", 401, "TINKER_API_KEY=tml-mtl_..."),
        ("tml-mtl_none", 401, "opens nothing"),
        (key_of(hub, "bob", "training:read"), 403, "training:write"),
    ):
        answer = hub.anonymous().post(AT + "create_session", json={}, headers={"X-API-Key": key} if key else {})
        assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text
    session = hub.signed_in("bob").post(AT + "create_session", json={})
    assert session.status_code == 401, "a cookie opens nothing here"
    anybody = hub.anonymous()
    assert anybody.post(AT + "telemetry", json={}).json() == {"status": "accepted"}
    assert anybody.get(AT + "healthz").status_code == 200
    assert "x-mettle-owner" not in anybody.get(AT + "files/1/2/3/4").text.lower()


def test_nothing_beside_its_own_routes_is_reached(hub, bob):
    for path in ("/train/small/admin/usage", "/train/small/", "/train/"):
        assert bob.get(path).status_code == 404
    told = bob.get(AT + "..%2f..%2fadmin/usage").json()
    assert told["path"] == "/api/v1/..%2f..%2fadmin/usage"


def test_what_is_not_offered_is_one_line(hub, bob):
    answer = bob.post("/train/large/api/v1/create_session", json={})
    assert (answer.status_code, answer.json()["detail"]) == (404, "no training on 'large' here; there is small")
    hub.lab.train_offers = ()
    answer = bob.post(AT + "create_session", json={})
    assert answer.json()["detail"] == "this Hub offers no training service (--train-models)"
    assert "none: no train_models" in hub.signed_in("ann").get("/settings").text


def test_a_process_that_is_not_there_is_waited_for(hub, bob, services):
    assert bob.get(AT + "cut").status_code == 503
    services.close()
    answer = bob.post(AT + "create_session", json={})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "this Hub is being stopped" in answer.json()["detail"]
    write_state(hub.lab.folder, "small", ServiceState("http://127.0.0.1:9", "key", os.getpid()))
    assert bob.post(AT + "create_session", json={}).status_code == 503


def test_bodies_and_the_number_of_requests_are_bounded(bob, monkeypatch):
    monkeypatch.setattr(proxies, "MAX_BODY_BYTES", 1000)
    assert bob.post(AT + "forward", content=b"x" * 1001).status_code == 413
    assert bob.post(AT + "forward", content=(b"x" * 600 for _ in range(2))).status_code == 413
    monkeypatch.setattr(proxies, "MAX_OPEN", 0)
    assert bob.post(AT + "forward", json={}).status_code == 429


def test_a_quota_that_is_used_up_is_told_to_the_process_for_what_computes(hub, bob):
    set_quota(hub, "bob", 0)
    told = bob.post(AT + "asample", json={}).json()["headers"]
    assert "ask an admin of this Hub" in told["x-mettle-refusal"]
    assert "x-mettle-refusal" not in bob.post(AT + "retrieve_future", json={}).json()["headers"]


def test_addresses_and_states_are_on_the_pages(hub, services):
    for who, page in (("ann", "/settings"), ("bob", "/training"), ("bob", "/docs")):
        assert "http://hub.test/train/small" in hub.signed_in(who).get(page).text
    assert "ready" in hub.signed_in("ann").get("/settings").text


@pytest.fixture
async def trained(hub, tmp_path):
    """A real service of a tiny model behind the Hub on a socket: its address, that of the process, its keys."""
    model = write_policy(tmp_path / "models" / "tiny", MINI)
    hub.lab.train_offers = offers_of(tmp_path / "models", ["tiny=org/tiny"])
    keys, listener = Keys.new(), bind("127.0.0.1", 0)
    config = TrainServeConfig(base_model=model, name="org/tiny", data=tmp_path / "data", port=0, device="cpu")
    async with serving(config, keys, is_for_others=True) as inner:
        write_state(hub.lab.folder, "tiny", ServiceState(inner, keys.api, os.getpid()))
        server = HttpServer(hub.app, listener)
        await server.start()
        yield f"{url_of('127.0.0.1', listener.getsockname()[1])}/train/tiny", inner, keys
        await hub.app.state.training_proxy.close()
        hub.app.state.training_proxy = None
        await server.stop()


async def test_a_model_is_trained_and_sampled_through_the_hub_and_seen_by_nobody_else(hub, trained):
    url, inner, keys = trained
    async with aiohttp.ClientSession() as http:
        bob, eve = (Wire(http, url, key_of(hub, slug)) for slug in ("bob", "eve"))
        model = await bob.model()
        losses = [(await _step(model))["metrics"]["loss:sum"] for _ in range(3)]
        assert losses[-1] < losses[0]
        info = await bob.post("get_info", model_id=model.model_id)
        assert info["model_data"]["tokenizer_id"] is None, "the folder is of the Hub's machine"
        saved = (await model.run("save_weights_for_sampler", path="one"))["path"]
        status, links = await bob.ask("GET", f"training_runs/{model.model_id}/checkpoints/sampler_weights/one/archive")
        assert status == 200, "the link leads through the Hub"
        assert b"adapter_model.safetensors" in links

        for path, body in (("get_info", {"model_id": model.model_id}), ("weights_info", {"tinker_path": saved})):
            assert (await eve.ask("POST", path, json=body))[0] == 404
        assert (await eve.ask("GET", "training_runs"))[1]["training_runs"] == []
        assert (await bob.ask("GET", "training_runs"))[1]["training_runs"][0]["model_owner"] == id_of(hub, "bob")

        # The process itself answers the Hub alone, and tells it what has been counted.
        assert (await Wire(http, inner, key_of(hub, "bob")).ask("GET", "sessions"))[0] == 401
        async with http.get(inner + "/admin/usage") as answer:
            assert answer.status == 401
        async with http.get(inner + "/admin/usage", headers={"Authorization": f"Bearer {keys.admin}"}) as answer:
            (counted,) = (await answer.json())["owners"]
        assert (counted["owner"], counted["num_tokens"]) == (id_of(hub, "bob"), 3 * (len("hello world") - 1))

        set_quota(hub, "bob", 0)
        with pytest.raises(Refused, match="ask an admin of this Hub") as refused:
            await _step(model)
        assert refused.value.category == "user"
        set_quota(hub, "bob", None)
        assert (await _step(model))["metrics"]["loss:sum"] < losses[0], "the refused number was used up"


async def _step(model):
    result = await model.run_pass([datum("hello world")])
    await model.step()
    return result
