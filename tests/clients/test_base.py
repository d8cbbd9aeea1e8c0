"""Clients that authors write in the steps that verifiers named."""

from __future__ import annotations

import pytest

from mettle.clients.base import Client
from mettle.clients.config import ClientConfig
from mettle.clients.endpoint_clients import AnthropicMessagesClient, OpenAIChatCompletionsClient
from mettle.clients.errors import ModelError
from mettle.clients.factory import client_from
from mettle.envs.workers.endpoints import client_spec
from mettle.errors import UserError
from mettle.records.messages import Response, ResponseMessage, Tool, UserMessage

PROMPT = [UserMessage(content="hi")]
TOOL = Tool(name="add", description="Add.", parameters={"type": "object", "properties": {}})
ANSWER = {
    "id": "r", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
}  # fmt: skip


class Shouting(Client[object, list, str, dict]):
    """All of an endpoint's steps, and an argument of its own."""

    def __init__(self, volume, client_or_config):
        super().__init__(client_or_config)
        self.volume = volume

    def setup_client(self, config):
        return {"url": config.api_base_url}

    async def to_native_tool(self, tool):
        return tool["name"].upper()

    async def to_native_prompt(self, messages):
        return [message["content"].upper() for message in messages], {"loud": True}

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        assert kwargs["loud"]
        return f"{self.client['url']} {prompt} {model} {sampling_args} {tools}" + "!" * self.volume

    async def raise_from_native_response(self, response):
        if "BAD" in response:
            raise ValueError("a bad answer")

    async def from_native_response(self, response):
        return Response(id="r", created=0, model="m", usage=None, message=ResponseMessage(content=response))


async def test_a_client_is_written_in_steps_and_has_arguments_of_its_own():
    client = Shouting(2, ClientConfig(api_base_url="http://a/v1"))
    response = await client.get_response(PROMPT, "m", {"top_p": 1}, [TOOL], state={})
    assert response.message.content == "http://a/v1 ['HI'] m {'top_p': 1} ['ADD']!!"
    with pytest.raises(ModelError, match="Shouting: ValueError: a bad answer"):
        await client.get_response([UserMessage(content="bad")], "m")
    assert client_from(client) is client


async def test_a_client_without_an_answer_says_what_it_lacks():
    with pytest.raises(UserError, match="Client is no client: it has neither get_response nor get_native_response"):
        await Client("anything").get_response(PROMPT, "m")


class Cached(OpenAIChatCompletionsClient):
    """One step of ours, changed."""

    def __init__(self, note, client_or_config):
        super().__init__(client_or_config)
        self.note = note

    async def to_native_prompt(self, messages):
        prompt, more = await super().to_native_prompt(messages)
        prompt[-1]["cache_control"] = {"type": self.note}
        return prompt, {**more, "metadata": {"a": 1}}

    async def from_native_response(self, response):
        assert response.choices[0].message.content == "hello"
        return await super().from_native_response(response)


async def test_one_step_of_ours_may_be_changed(endpoint):
    endpoint.answers = [ANSWER]
    client = Cached("ephemeral", endpoint.url)
    response = await client.get_response(PROMPT, "m", {"temperature": 0.5}, [TOOL], state={})
    assert response.message.content == "hello"
    sent = endpoint.requests[0]
    assert sent["messages"] == [{"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}}]
    assert sent["metadata"] == {"a": 1}
    assert sent["temperature"] == 0.5
    assert sent["tools"][0]["function"]["name"] == "add"
    await client.close()


async def test_the_steps_of_every_dialect_make_its_request(endpoint):
    said = [{"type": "text", "text": "hello"}]
    endpoint.answers = [
        {"id": "r", "type": "message", "role": "assistant", "model": "m", "content": said, "stop_reason": "end_turn"}
    ]

    class Named(AnthropicMessagesClient):
        async def to_native_prompt(self, messages):
            return await super().to_native_prompt(messages)

    prompt = [{"role": "system", "content": "be short"}, *PROMPT]
    for kind in (AnthropicMessagesClient, Named):
        client = kind(endpoint.url)
        assert (await client.get_response(prompt, "m", {"max_tokens": 5}, [TOOL])).message.content == "hello"
        await client.close()
    assert endpoint.requests[0] == endpoint.requests[1]


async def test_the_sdks_object_is_there_for_who_wants_it(endpoint):
    endpoint.answers = [ANSWER]
    client = OpenAIChatCompletionsClient(ClientConfig(api_base_url=endpoint.url, extra_headers={"X-Mine": "1"}))
    async with client.client as sdk:
        answer = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "hello"
    assert {name.lower(): value for name, value in endpoint.headers[0].items()}["x-mine"] == "1"


def test_a_client_of_somebodys_own_is_not_made_again_as_another_in_a_worker():
    with pytest.raises(UserError, match="cannot take over a Cached"):
        client_spec(Cached("note", "http://127.0.0.1:1/v1"))
