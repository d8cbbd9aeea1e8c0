"""Models of the Hub under `/v1` and on the page: who may ask which, what comes back, and what is counted."""

import json
import time

import pytest

from mettle.hub.serving.models import find_model
from mettle.hub.training import usage
from mettle.hub.training.jobs import run_folder

CHAT = "/v1/chat/completions"
TURN = [{"role": "user", "content": "hello"}]


@pytest.fixture
def hub(hub, engines_of, tmp_path):
    """With an operator's model `small`, and engines on the Hub's loop."""
    hub.lab.models = tmp_path / "models"
    for name in ("small", "broken"):
        (hub.lab.models / name).mkdir(parents=True)
        (hub.lab.models / name / "config.json").write_text("{}")
    engines = engines_of(hub.lab.folder / "served")
    hub.app.state.engines = engines
    hub.anonymous()  # which begins the loop
    hub._portal.call(engines.__aenter__)
    yield hub
    hub._portal.call(engines.__aexit__)


def used(hub, slug):
    with hub.lab.database.read() as c:
        person = hub.signed_in(slug).get("/api/v1/user/whoami").json()["data"]["id"]
        return usage.tokens_this_month(c, person)


def test_answers_whole_and_streamed_are_passed_on_and_counted_once(hub):
    bob = hub.with_token("bob")
    assert [each["id"] for each in bob.get("/v1/models").json()["data"]] == ["broken", "small"]
    whole = bob.post(CHAT, json={"model": "small", "messages": TURN}).json()
    assert whole["choices"][0]["message"]["content"] == "small heard 1"
    assert used(hub, "bob") == 7
    events = bob.post(CHAT, json={"model": "small", "messages": TURN, "stream": True}).text.split("\n\n")
    assert [json.loads(each[5:])["choices"][0]["delta"]["content"] for each in events[:2]] == ["so ", "it is"]
    assert events[2:] == ["data: [DONE]", ""], "nobody has asked for the usage"
    assert used(hub, "bob") == 14
    asked = {"model": "small", "messages": TURN, "stream": True, "stream_options": {"include_usage": True}}
    told = bob.post(CHAT, json=asked).text
    assert '"total_tokens": 7' in told
    assert '"total_tokens": 5' not in told
    assert used(hub, "bob") == 21
    asked["stream_options"] = {"continuous_usage_stats": True}
    told = bob.post(CHAT, json=asked).text
    assert told.count('"total_tokens": 5') == 2
    assert '"total_tokens": 7' not in told
    assert used(hub, "bob") == 28


def test_what_cannot_be_asked_is_refused_as_openai_clients_read_it(hub):
    bob = hub.with_token("bob")
    for body, status, words in (
        ({"messages": TURN}, 400, "model is missing"),
        ({"model": "none-such", "messages": TURN}, 404, "none of this Hub (broken, small)"),
        ({"model": "c" + "a" * 24, "messages": TURN}, 404, "not found"),
        ({"model": "small", "messages": TURN, "max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"model": "small", "messages": TURN, "stream": True, "stream_options": "all"}, 400, "'all' and no object"),
        ({"model": "broken", "messages": TURN}, 503, "this model has no tokenizer"),
    ):
        answer = bob.post(CHAT, json=body)
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]["message"]
    assert hub.anonymous().post(CHAT, json={"model": "small"}).status_code == 401
    assert used(hub, "bob") == 0


def test_an_unknown_model_is_told_in_the_words_of_openai(hub):
    bob = hub.with_token("bob")
    for name in ("none-such", "c" + "a" * 24):
        body = {"model": name, "messages": TURN, "prompt": "x"}
        answers = [bob.post(CHAT, json=body), bob.post("/v1/completions", json=body), bob.get(f"/v1/models/{name}")]
        for answer in answers:
            told = answer.json()["error"]
            assert (answer.status_code, told["type"]) == (404, "not_found_error")
            assert (told["param"], told["code"]) == ("model", "model_not_found")
            assert name in told["message"]


def test_a_quota_that_is_used_up_refuses_the_next_question(hub):
    bob = hub.with_token("bob")
    person = bob.get("/api/v1/user/whoami").json()["data"]["id"]
    with hub.lab.database.write() as c:
        usage.set_quota(c, person, 10)
    codes = [bob.post(CHAT, json={"model": "small", "messages": TURN}).status_code for _ in range(3)]
    assert codes == [200, 200, 403]


def test_a_version_of_a_run_is_asked_by_those_alone_whose_it_is(hub):
    body = {"model": "tiny", "environments": [{"id": "reverse-text"}], "batch_size": 32, "name": "mine"}
    bob = hub.with_token("bob")
    run = bob.post("/api/v1/rft/runs", json=body).json()["run"]["id"]
    assert bob.post(CHAT, json={"model": run, "messages": TURN}).status_code == 404, "it has no version yet"
    for number in (2, 10):
        (run_folder(hub.lab.folder, run) / "weights" / f"v{number}").mkdir(parents=True)
    for name, said in ((run, 10), (f"{run}:v2", 2), (f"{run}@2", 2)):
        answer = bob.post(CHAT, json={"model": name, "messages": TURN}).json()
        assert answer["choices"][0]["message"]["content"] == f"{run}:v{said} heard 1"
    assert hub.with_token("eve").post(CHAT, json={"model": run, "messages": TURN}).status_code == 404
    assert [each["id"] for each in bob.get("/v1/models").json()["data"]][-1] == f"{run}:v10"
    assert run not in hub.with_token("eve").get("/v1/models").text
    assert bob.post(CHAT, json={"model": f"{run}:v3", "messages": TURN}).status_code == 404


def test_people_talk_to_a_model_on_its_page(hub):
    bob = hub.signed_in("bob")
    assert "There is no model" not in bob.get("/chat").text
    first = bob.form("/chat", model="small", messages="[]", text="<b>hello")
    assert first.status_code == 200
    assert "&lt;b&gt;hello" in first.text
    assert "small heard 1" in first.text
    kept = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert "small heard 3" in bob.form("/chat", model="small", messages=kept, text="and then?").text
    assert bob.form("/chat", model="small", messages="{not json", text="x").status_code == 200
    for fields, status, words in (
        ({"model": "small", "text": " "}, 400, "say something"),
        ({"model": "none", "text": "x"}, 404, "none of this Hub"),
        ({"model": "broken", "text": "keep this"}, 503, "keep this"),
    ):
        answer = bob.form("/chat", messages=kept, **fields)
        assert (answer.status_code, words in answer.text) == (status, True)
    assert bob.post("/chat", data={"text": "x", "model": "small"}).status_code == 403, "without the word"


def test_a_hub_that_serves_none_says_so(hub):
    hub.app.state.engines = None
    assert hub.with_token("bob").post(CHAT, json={"model": "small", "messages": TURN}).status_code == 503
    assert "This Hub serves no models" in hub.signed_in("bob").get("/chat").text


def test_answers_are_a_row_of_usage_at_the_price_of_the_model(hub):
    bob = hub.with_token("bob")
    with hub.lab.database.write() as c:
        usage.set_price(c, "small", 1e6)
    bob.post(CHAT, json={"model": "small", "messages": TURN})
    with hub.lab.database.read() as c:
        found = usage.usage_of(c, bob.get("/api/v1/user/whoami").json()["data"]["id"], usage.month_of(time.time()))
    assert [(name, model, tokens, usd) for _, name, model, tokens, usd in found.jobs] == [("answers", "small", 7, 7.0)]


def test_a_model_is_found_by_nothing_but_its_name(hub):
    from mettle.hub.caller import Caller
    from mettle.web.problems import HttpError

    with hub.lab.database.read() as c:
        for name in ("../small", "small/", "", "SMALL"):
            with pytest.raises(HttpError):
                find_model(c, hub.lab, Caller(), name)
