"""The official `openai` client against the Hub's `/v1`, with a real inference server behind it.

The engine is the mock, which says what it is told to: what is looked at is the wire from the client through the Hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest

from mettle.clients.renderer import Renderer
from mettle.hub.accounts import people
from mettle.hub.serving.engines import ModelEngines
from mettle.hub.training import usage
from mettle.inference.bridge import Bridge
from mettle.inference.engine.mock import MockEngine
from mettle.inference.server import InferenceServer
from mettle.inference.service import ModelService
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig
from mettle.web.keys import Keys
from mettle.web.server import HttpServer, bind, url_of

HI = [{"role": "user", "content": "hi"}]
SAID = "so it is"
KEY = "of the Hub's"
MINI = PolicyConfig(num_layers=1, hidden_size=32, mlp_size=32, num_heads=1, num_kv_heads=1, head_dim=32)


class OneEngine:
    """In the place of `ModelEngines`: the server of the test answers for every model."""

    def __init__(self, url):
        self._engine = SimpleNamespace(url=url, key=KEY)

    @contextlib.asynccontextmanager
    async def using(self, model):
        yield self._engine


@contextlib.asynccontextmanager
async def listening(hub, engines):
    hub.app.state.engines = engines
    listener = bind("127.0.0.1", 0)
    server = HttpServer(hub.app, listener)
    await server.start()
    yield url_of("127.0.0.1", listener.getsockname()[1]) + "/v1"
    await server.stop()


@pytest.fixture
def hub(hub, tmp_path):
    hub.lab.models = tmp_path / "models"
    write_policy(hub.lab.models / "small", MINI)
    return hub


@pytest.fixture
async def address(hub):
    """The Hub's `/v1` in front of an inference server whose policy says `SAID`."""
    renderer = Renderer.from_directory(hub.lab.models / "small")
    engine = MockEngine(lambda prompt, choice: renderer.encode(SAID))
    inner = InferenceServer(ModelService(Bridge(engine), renderer, "small"), bind("127.0.0.1", 0), keys=Keys(KEY))
    await inner.start()
    async with listening(hub, OneEngine(inner.base_url)) as url:
        yield url
    await inner.stop(0)


@pytest.fixture
async def client_of(openai, hub, address):
    """Makes clients with a token of somebody."""
    opened = []

    def make(slug="bob", *scopes, key=""):
        token = key or hub.token(slug, *(scopes or ("evals:write",)))
        opened.append(openai.AsyncOpenAI(base_url=address, api_key=token, max_retries=0))
        return opened[-1]

    yield make
    for each in opened:
        await each.close()


def used(hub, slug):
    with hub.lab.database.read() as c:
        return usage.tokens_this_month(c, people.find_person(c, slug).id)


async def test_models_are_listed_and_found_by_their_names(openai, client_of):
    client = client_of()
    assert [(each.id, each.owned_by) async for each in client.models.list()] == [("small", "small")]
    assert (await client.models.retrieve("small")).id == "small"
    with pytest.raises(openai.NotFoundError, match="none of this Hub") as missing:
        await client.models.retrieve("gpt-4")
    assert missing.value.code == "model_not_found"


async def test_an_answer_comes_whole_with_its_usage_which_is_what_is_counted(client_of, hub):
    answer = await client_of().chat.completions.create(model="small", messages=HI, max_tokens=len(SAID))
    assert answer.choices[0].message.content == SAID
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(SAID)
    assert answer.usage.prompt_tokens > 0
    assert used(hub, "bob") == answer.usage.total_tokens
    text = await client_of().completions.create(model="small", prompt="hi", max_tokens=3)
    assert text.choices[0].text == SAID[:3]
    assert used(hub, "bob") == answer.usage.total_tokens + text.usage.total_tokens


async def test_a_stream_comes_piece_by_piece_and_is_counted_whether_or_not_its_usage_is_asked_for(client_of, hub):
    client = client_of()
    seen = []
    for options in ({}, {"stream_options": {"include_usage": True}}):
        before, pieces, told = used(hub, "bob"), [], None
        stream = await client.chat.completions.create(
            model="small", messages=HI, max_tokens=len(SAID), stream=True, **options
        )
        async for chunk in stream:
            pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
            told = chunk.usage or told
        assert "".join(pieces) == SAID
        assert len(pieces) > 1
        seen.append((told and told.total_tokens, used(hub, "bob") - before))
    (silent, counted), (asked, again) = seen
    assert silent is None
    assert counted == asked == again > len(SAID)


async def test_what_a_client_has_used_that_goes_away_is_counted_and_its_answer_ends(openai, hub):
    ended = asyncio.Event()

    async def begin(reader, writer):
        """An engine that has sampled two tokens and is at the third."""
        await reader.readuntil(b"\r\n\r\n")
        piece = {"choices": [{"index": 0, "delta": {"content": "so"}}], "usage": {"total_tokens": 9}}
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        writer.write(f"data: {json.dumps(piece)}\n\n".encode())
        while await reader.read(4096):
            pass
        ended.set()
        writer.close()

    engine = await asyncio.start_server(begin, "127.0.0.1", 0)
    url = url_of("127.0.0.1", engine.sockets[0].getsockname()[1])
    async with listening(hub, OneEngine(url)) as address, asyncio.timeout(60):
        client = openai.AsyncOpenAI(base_url=address, api_key=hub.token("bob", "evals:write"), max_retries=0)
        stream = await client.chat.completions.create(model="small", messages=HI, stream=True)
        assert (await anext(aiter(stream))).choices[0].delta.content == "so"
        await client.close()
        await ended.wait()
        while not used(hub, "bob"):  # noqa: ASYNC110 - another thread counts
            await asyncio.sleep(0.01)
        assert used(hub, "bob") == 9
    engine.close()


async def test_what_is_refused_is_the_exception_that_its_users_catch(openai, client_of, hub):
    with pytest.raises(openai.AuthenticationError, match="opens nothing") as wrong:
        await client_of(key="mtl_none").chat.completions.create(model="small", messages=HI)
    assert wrong.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        await client_of(key="mtl_none").models.list()
    with pytest.raises(openai.PermissionDeniedError, match="evals:write"):
        await client_of("bob", "training:read").chat.completions.create(model="small", messages=HI)
    for asked in (
        client_of().chat.completions.create(model="gpt-4", messages=HI),
        client_of().completions.create(model="gpt-4", prompt="hi"),
    ):
        with pytest.raises(openai.NotFoundError, match="none of this Hub") as unknown:
            await asked
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError, match="model is missing"):
        await client_of().post("/chat/completions", body={"messages": HI}, cast_to=object)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        await client_of().chat.completions.create(model="small", messages=HI, max_tokens=-1)
    with hub.lab.database.write() as c:
        usage.set_quota(c, people.find_person(c, "bob").id, 0)
    with pytest.raises(openai.PermissionDeniedError, match="ask an admin"):
        await client_of().chat.completions.create(model="small", messages=HI)
    assert used(hub, "bob") == 0
    hub.app.state.engines = None
    with pytest.raises(openai.InternalServerError, match="serves no models"):
        await client_of("eve").chat.completions.create(model="small", messages=HI)


@pytest.mark.nightly
@pytest.mark.e2e
async def test_a_model_of_the_operator_answers_in_a_process_of_its_own(openai, hub, tmp_path):
    async with (
        ModelEngines(hub.lab.folder / "served", max_engines=1, idle_s=600.0) as engines,
        listening(hub, engines) as url,
        openai.AsyncOpenAI(base_url=url, api_key=hub.token("bob")) as client,
    ):
        more = {"model": "small", "messages": HI, "max_tokens": 4, "extra_body": {"ignore_eos": True}}
        answers = await asyncio.gather(*(client.chat.completions.create(**more) for _ in range(3)))
        assert [each.usage.completion_tokens for each in answers] == [4, 4, 4]
        assert used(hub, "bob") == sum(each.usage.total_tokens for each in answers)
