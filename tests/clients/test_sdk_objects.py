"""A caller's own `AsyncOpenAI`: a plain one is taken over with all that it says, any other is called as it is."""

from __future__ import annotations

import gc
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from mettle.clients.factory import client_from
from mettle.clients.sdk_objects import is_plain
from mettle.errors import RolloutError
from mettle.records.messages import UserMessage

if TYPE_CHECKING:
    from openai import AsyncOpenAI

PROMPT = [UserMessage(content="hi")]
ANSWER = {
    "id": "r", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
}  # fmt: skip


def made(url: str = "http://127.0.0.1:1/v1", **options: object) -> AsyncOpenAI:
    import openai

    return openai.AsyncOpenAI(base_url=url, **{"api_key": "k", **options})


async def test_a_plain_object_is_taken_over_with_all_that_it_says(endpoint):
    endpoint.answers = [ANSWER]
    sdk = made(
        endpoint.url + "/", api_key="secret", organization="org", project="proj", timeout=7.0, max_retries=3,
        default_headers={"X-Mine": "1", "OpenAI-Project": "other"},
    )  # fmt: skip
    client = client_from(sdk)
    response = await client.get_response(PROMPT, "m", {"max_tokens": 5, "extra_body": {"min_p": 0.1}})
    assert response.message.content == "hello"
    sent = endpoint.headers[0]
    assert sent["Authorization"] == "Bearer secret"
    assert (sent["OpenAI-Organization"], sent["OpenAI-Project"], sent["X-Mine"]) == ("org", "other", "1")
    assert "stainless" not in str(sent).lower()
    assert endpoint.requests[0]["max_tokens"] == 5
    assert endpoint.requests[0]["min_p"] == 0.1
    transport = client.endpoint.transport
    assert (transport._timeout_s, transport._connect_timeout_s, transport.retry.max_retries) == (7.0, 7.0, 3)
    await client.close()


async def test_a_header_that_is_left_out_on_purpose_stays_out(openai, endpoint):
    endpoint.answers = [ANSWER]
    sdk = made(endpoint.url, default_headers={"Authorization": openai.Omit()})
    client = client_from(sdk)
    await client.get_response(PROMPT, "m")
    assert "Authorization" not in endpoint.headers[0]
    await client.close()


async def test_a_key_that_is_renewed_counts_from_then_on(endpoint):
    endpoint.answers = [ANSWER]
    sdk = made(endpoint.url)
    client = client_from(sdk)
    await client.get_response(PROMPT, "m")
    sdk.api_key = "renewed"
    await client.get_response(PROMPT, "m")
    assert [sent["Authorization"] for sent in endpoint.headers] == ["Bearer k", "Bearer renewed"]
    await client.close()


async def test_what_is_about_one_call_goes_through_the_sdk(endpoint):
    endpoint.answers = [ANSWER]
    async with made(endpoint.url, max_retries=0) as sdk:
        client = client_from(sdk)
        options = {
            "extra_headers": {"X-Call": "1"},
            "extra_query": {"q": "2"},
            "timeout": 5,
            "top_k": 3,
            "temperature": 1.0,
        }
        response = await client.get_response(PROMPT, "m", options)
    assert response.message.content == "hello"
    assert {name.lower(): value for name, value in endpoint.headers[0].items()}["x-call"] == "1"
    assert endpoint.requests[0] == {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "top_k": 3, "temperature": 1.0,
    }  # fmt: skip


def test_an_object_given_often_has_one_transport():
    sdk = made()
    assert client_from(sdk).endpoint.transport is client_from(sdk).endpoint.transport


async def test_connections_end_with_the_object(endpoint, caplog):
    endpoint.answers = [ANSWER]
    await client_from(made(endpoint.url)).get_response(PROMPT, "m")
    gc.collect()
    assert "Unclosed" not in caplog.text


def test_the_blocking_kind_is_taken_over_too(openai):
    assert is_plain(openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="k"))


def mine(openai: ModuleType, url: str) -> AsyncOpenAI:
    """Somebody's own kind of client."""
    return type("Mine", (openai.AsyncOpenAI,), {})(base_url=url, api_key="k")


async def _key() -> str:
    return "k"


@pytest.mark.parametrize(
    "make",
    [
        lambda openai: mine(openai, "http://127.0.0.1:1/v1"),
        lambda openai: openai.AsyncAzureOpenAI(azure_endpoint="http://127.0.0.1:1", api_key="k", api_version="v"),
        lambda openai: made(http_client=openai.DefaultAsyncHttpxClient()),
        lambda _: made(default_query={"api-version": "1"}),
        lambda _: made(api_key=_key),
        lambda _: SimpleNamespace(chat=None, base_url="http://127.0.0.1:1/v1"),
    ],
    ids=["subclass", "azure", "http client", "query", "key provider", "look-alike"],
)
def test_an_object_that_does_more_is_called_as_it_is(openai, make):
    sdk = make(openai)
    assert not is_plain(sdk)
    assert client_from(sdk).endpoint.transport is None


def test_a_method_that_somebody_replaced_is_called(monkeypatch):
    async def create(**_: object) -> None: ...

    sdk = made()
    assert is_plain(sdk)
    sdk.chat.completions.create = create
    assert not is_plain(sdk)

    hooked = made()
    hooked._client.event_hooks = {"request": [create]}
    assert not is_plain(hooked)

    whole = made()
    whole.chat = SimpleNamespace(completions=SimpleNamespace(create=create))
    assert not is_plain(whole)

    traced = made()
    monkeypatch.setattr(type(traced.chat.completions), "create", create)
    assert not is_plain(traced)


def test_a_network_that_a_test_replaced_is_used(monkeypatch):
    async def handle(self: object, request: object) -> None: ...

    sdk = made()
    monkeypatch.setattr(type(sdk._client._transport), "handle_async_request", handle)
    assert not is_plain(sdk)


async def test_a_refusal_is_the_same_error_either_way(openai, endpoint):
    endpoint.answers = [(401, '{"error": {"message": "no such key"}}')]
    for sdk in (made(endpoint.url), mine(openai, endpoint.url)):
        with pytest.raises(RolloutError, match="no such key"):
            await client_from(sdk).get_response(PROMPT, "m")
