"""Chat and text completions: what is sent, what comes back, and what is not an answer."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mettle.clients.config import ClientConfig
from mettle.clients.dialects.chat import wire_message, wire_tool
from mettle.clients.endpoint_clients import OpenAIChatCompletionsClient, OpenAICompletionsClient
from mettle.clients.errors import EmptyModelResponseError, InvalidModelResponseError, ModelError, OverlongPromptError
from mettle.clients.factory import client_from
from mettle.errors import UserError
from mettle.records.messages import AssistantMessage, Tool, ToolMessage, UserMessage

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def chat_answer(message, finish_reason="stop", **fields):
    return {"id": "x", "model": "m", "choices": [{"message": message, "finish_reason": finish_reason}], **fields}


@pytest.fixture
async def client(endpoint):
    made = OpenAIChatCompletionsClient(endpoint.url)
    yield made
    await made.close()


async def test_a_conversation_with_tools_goes_out_nested_and_comes_back_flat(endpoint, client):
    endpoint.answers = [chat_answer({"content": None, "tool_calls": [CALL]}, "tool_calls")]
    tool = Tool(name="add", description="Adds.", parameters={"type": "object"}, strict=True)
    prompt = [
        UserMessage(content="hi"),
        AssistantMessage(tool_calls=[CALL]),
        ToolMessage(content="2", tool_call_id="c1"),
    ]
    response = await client.get_response(
        prompt, "m", {"max_tokens": 5, "top_p": None, "extra_body": {"top_k": 2}}, [tool]
    )
    sent = endpoint.requests[0]
    assert sent["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert sent["tools"][0]["function"]["name"] == "add"
    assert (sent["max_tokens"], sent["top_k"], "top_p" in sent) == (5, 2, False)
    call = response.message.tool_calls[0]
    assert (call.id, call.name, call.function.arguments) == ("c1", "add", '{"a": 1}')
    assert response.message.is_truncated is False


async def test_token_ids_and_versions_are_read_where_the_endpoint_returns_them(endpoint, client):
    answer = chat_answer({"content": "a"}, "length", prompt_token_ids=[1, 2], usage={"prompt_tokens": 2})
    answer["choices"][0] |= {
        "token_ids": [7],
        "versions": [4],
        "logprobs": {"content": [{"token": "a", "logprob": -0.25}]},
    }
    endpoint.answers = [answer]
    response = await client.get_response([UserMessage(content="hi")], "m", {})
    tokens = response.message.tokens
    assert (tokens["prompt_ids"], tokens["completion_ids"]) == ([1, 2], [7])
    assert (tokens["completion_logprobs"], tokens["completion_versions"]) == ([-0.25], [4])
    assert response.message.is_truncated is True
    assert response.usage.total_tokens == 2


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({}, InvalidModelResponseError),
        ({"choices": []}, InvalidModelResponseError),
        ({"choices": [{"finish_reason": "stop"}]}, InvalidModelResponseError),
        (chat_answer({"content": None}), EmptyModelResponseError),
    ],
)
async def test_what_is_no_answer_is_an_error(endpoint, client, answer, kind):
    endpoint.answers = [answer]
    with pytest.raises(kind, match=endpoint.url):
        await client.get_response([UserMessage(content="hi")], "m", {})


async def test_empty_text_and_bare_reasoning_are_answers(endpoint, client):
    endpoint.answers = [chat_answer({"content": ""}), chat_answer({"content": None, "reasoning_content": "hm"})]
    assert (await client.get_response([UserMessage(content="hi")], "m", {})).message.content == ""
    assert (await client.get_response([UserMessage(content="hi")], "m", {})).message.reasoning_content == "hm"


async def test_an_sdk_object_is_called_as_it_is():
    seen = {}

    async def create(**fields):
        seen.update(fields)
        return chat_answer({"content": "ok"})

    sdk = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)), base_url="http://x/v1/")
    client = client_from(sdk)
    response = await client.get_response([UserMessage(content="hi")], "m", {"extra_body": {"top_k": 1}, "n": 1})
    assert response.message.content == "ok"
    assert seen["extra_body"] == {"top_k": 1}


async def test_an_sdk_object_is_called_for_text_completions_too():
    seen = []

    async def create(**fields):
        seen.append(fields)
        return SimpleNamespace(model_dump=lambda: {"choices": [{"text": "hi", "finish_reason": "length"}]})

    sdk = SimpleNamespace(completions=SimpleNamespace(create=create), base_url="http://x/v1/")
    client = OpenAICompletionsClient(sdk)
    response = await client.get_response([UserMessage(content="a")], "m", {"n": None, "extra_body": {"top_k": 1}})
    await client.close()
    assert seen == [{"model": "m", "prompt": "a", "extra_body": {"top_k": 1}}]
    assert (response.message.content, response.message.is_truncated) == ("hi", True)
    assert client.base_url == "http://x/v1"


async def test_an_sdk_failure_is_a_model_error():
    class Refused(Exception):
        status_code = 400

    async def create(**_):
        raise Refused("maximum context length is 10 tokens")

    async def broken(**_):
        raise RuntimeError("boom")

    completions = SimpleNamespace(create=create)
    client = OpenAIChatCompletionsClient(
        SimpleNamespace(chat=SimpleNamespace(completions=completions), base_url="http://x")
    )
    with pytest.raises(OverlongPromptError):
        await client.get_response([UserMessage(content="hi")], "m", {})
    completions.create = broken
    with pytest.raises(ModelError, match="http://x: RuntimeError: boom"):
        await client.get_response([UserMessage(content="hi")], "m", {})


async def test_text_completions(endpoint):
    endpoint.answers = [{"choices": [{"text": " world", "finish_reason": "length"}]}, {"choices": [{"text": None}]}]
    client = OpenAICompletionsClient(endpoint.url)
    response = await client.get_response([UserMessage(content="hello")], "m", {"max_tokens": 2})
    assert endpoint.requests[0]["prompt"] == "hello"
    assert (response.message.content, response.message.is_truncated) == (" world", True)
    with pytest.raises(InvalidModelResponseError, match="without text"):
        await client.get_response([UserMessage(content="hello")], "m", {})
    await client.close()


def test_a_key_goes_to_the_host_it_belongs_to(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("MINE", "mine")
    keys = []
    for config in (
        "http://127.0.0.1:1/v1",
        ClientConfig("https://api.openai.com/v1"),
        ClientConfig("http://a/v1", "MINE"),
    ):
        keys.append(OpenAIChatCompletionsClient(config).endpoint.transport.headers.get("Authorization"))
    assert keys == [None, "Bearer secret", "Bearer mine"]


def test_mistakes_in_the_endpoint_are_the_users(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UserError, match="no base URL"):
        client_from("localhost:8000")
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        client_from(ClientConfig())
    with pytest.raises(UserError, match="client type 'grpc'"):
        client_from(ClientConfig("http://a/v1", client_type="grpc"))
    with pytest.raises(UserError, match="through int"):
        client_from(3)


def test_wire_forms_are_plain_json():
    message = AssistantMessage(content="x", reasoning_content=None, thinking_blocks=[1])
    assert json.loads(json.dumps(wire_message(message))) == {"role": "assistant", "content": "x"}
    nested = {"type": "function", "function": {"name": "f"}}
    assert wire_tool(nested) == nested


@pytest.mark.parametrize("kind", ["chat", "completions", "responses", "anthropic"])
async def test_headers_are_taken_from_the_state_of_the_rollout_that_asks(endpoint, kind):
    endpoint.answers = [(400, "no")]
    keys = {"X-Session-ID": "trajectory_id", "X-Task": "task", "X-None": "missing"}
    made = client_from(ClientConfig(api_base_url=endpoint.url, client_type=kind, extra_headers_from_state=keys))
    for session in ("a", "b"):
        state = {"trajectory_id": session, "task": "line\r\nX-Forged: 1 \u00e9"}
        with pytest.raises(ModelError):
            await made.get_response([UserMessage(content="hi")], "m", {}, state=state)
    await made.close()
    assert [sent["X-Session-ID"] for sent in endpoint.headers] == ["a", "b"]
    assert endpoint.headers[0]["X-Task"] == "line%0D%0AX-Forged: 1 %C3%A9"
    assert "X-Forged" not in endpoint.headers[0]
    assert "X-None" not in endpoint.headers[0]


def test_a_client_that_shares_requests_refuses_headers_from_state():
    config = ClientConfig("http://127.0.0.1:1/v1", client_type="tokens", extra_headers_from_state={"X": "task"})
    with pytest.raises(UserError, match="shares requests"):
        client_from(config)
