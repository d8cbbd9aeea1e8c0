"""The verbs of both clients of a Hub, against a real server: each is written once, and asked in both ways."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from tests.hub.archives_made import push, wheel
from tests.hub.lab_writer import HubWriter
from tests.serving import app_on_a_thread

import mettle
from mettle.clients.hub_verbs import HubVerbs, Verb
from mettle.errors import ServiceError, UserError

RUN = {"model": "tiny", "environments": [{"id": "reverse-text"}], "batch_size": 32}
VERBS = {name for name, value in vars(HubVerbs).items() if isinstance(value, Verb)}


class AtOnce:
    """The awaited client as if it answered at once, so that one test asks both."""

    def __init__(self, context, loop):
        self.client, self.loop = mettle.AsyncClient(context), loop

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.loop.run(getattr(self.client, name)(*args, **kwargs))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A Hub on a port, with an environment of bob's; its address and his token."""
    hub = HubWriter(tmp_path_factory.mktemp("hub"))
    hub.person("bob")
    hub.team("robots", "bob")
    assert push(hub.with_token("bob"), visibility="PUBLIC").status_code == 200
    with app_on_a_thread(hub.app) as url:
        yield url, hub.token("bob"), hub
    hub.close()


@pytest.fixture(params=["at once", "awaited"])
def client(served, request):
    context = mettle.HubContext(served[0], served[1])
    if request.param == "at once":
        with mettle.Client(context) as made:
            yield made
        return
    with asyncio.Runner() as loop:
        made = AtOnce(context, loop)
        yield made
        loop.run(made.client.close())


def test_each_verb_does_its_work(client, served, tmp_path):
    assert client.whoami()["slug"] == "bob"
    assert [each["slug"] for each in client.teams()] == ["robots"]
    assert [each["name"] for each in client.environments("what it is")] == ["my-task"]
    assert client.environment("bob/my-task@0.1.0")["semantic_version"] == "0.1.0"
    assert [each["version"] for each in client.versions("bob/my-task")] == ["0.1.0"]
    saved = client.download_environment("bob/my-task", tmp_path / "one.whl")
    assert saved.read_bytes() == wheel()
    rows = [{"example_id": n // 2, "reward": float(n % 3 == 0), "answer": '\u00e4 "x"'} for n in range(250)]
    pushed = [
        client.push_evaluation("one", "bob/my-task", iter(rows[k:]), model=f"m{k}", is_public=True) for k in (0, 1)
    ]
    ids = [each["evaluation_id"] for each in pushed]
    assert client.evaluation(ids[0])["total_samples"] == 250
    assert {each["evaluation_id"] for each in client.evaluations(environment="bob/my-task")} >= set(ids)
    assert len(client.samples(ids[0])) == 250
    assert [row["example_id"] for row in client.samples(ids[0], limit=120)] == [n // 2 for n in range(120)]
    assert {place["model_name"] for place in client.leaderboard("bob/my-task")} == {"m0", "m1"}
    assert client.compare(ids)
    run = client.start_run(RUN)
    assert client.run(run["id"])["status"] == "QUEUED"
    assert run["id"] in [each["id"] for each in client.runs()]
    assert client.run_metrics(run["id"]) == []
    assert client.checkpoints(run["id"]) == []
    for verb in (lambda: client.run_logs(run["id"]), lambda: client.restart_run(run["id"], step=3)):
        with pytest.raises(UserError, match="refused"):
            verb()
    assert client.stop_run(run["id"])["status"] == "STOPPED"
    version = served[2].lab.folder / "runs" / run["id"] / "weights" / "v3"
    version.mkdir(parents=True)
    (version / "model.safetensors").write_bytes(b"x" * 100)
    assert client.download_checkpoint(run["id"], 3, tmp_path / "v3.tar").stat().st_size > 100
    assert client.usage()["owners"] is not None


def test_a_refusal_is_one_line_and_leaves_no_file(client, tmp_path):
    with pytest.raises(UserError, match="HTTP 404"):
        client.environment("bob/nothing")
    with pytest.raises(UserError, match="names no environment"):
        client.environment("nothing")
    with pytest.raises(UserError, match="HTTP 404"):
        client.download("/packages/bob/my-task/9.9/none.whl", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "slug", ["../../tokens", "bob/my-task/../..", "bob/my?task", "bob/my-task@../../x", "/x", "bob/"]
)
def test_a_name_stays_one_part_of_a_path(client, slug):
    with pytest.raises(UserError):
        client.environment(slug)


def test_both_clients_have_the_verbs_and_the_same_ways_to_ask_more():
    assert len(VERBS) > 20
    for name in VERBS:
        assert getattr(HubVerbs, name).__doc__
    own = [
        {n for n, value in vars(each).items() if inspect.isfunction(value) and not n.startswith("_")}
        for each in (mettle.Client, mettle.AsyncClient)
    ]
    assert own[0] == own[1]


async def test_many_questions_are_asked_at_once(served):
    async with mettle.AsyncClient(mettle.HubContext(served[0], served[1])) as hub:
        found = await asyncio.gather(*(hub.whoami() for _ in range(5)), hub.environments(), return_exceptions=True)
    assert [each["slug"] for each in found[:5]] == ["bob"] * 5


async def test_a_hub_that_is_silent_is_said_so():
    async with mettle.AsyncClient(mettle.HubContext("http://127.0.0.1:9")) as hub:
        with pytest.raises(ServiceError, match="is `mettle hub serve` running there"):
            await hub.whoami()


def test_the_token_goes_to_no_other_address(served):
    """An answer may name any address of a file; what is asked is that path here."""
    from mettle.clients.hub_requests import ApiRequest, own_path

    assert own_path("https://evil.test/packages/x?y=1") == "/packages/x"
    with pytest.raises(AssertionError):
        ApiRequest("GET", "https://evil.test/x").address  # noqa: B018
    request = ApiRequest("PUT", "https://store.test/x", is_public=True)
    assert request.arguments()["headers"] == {"Authorization": ""}
