"""The Messages API: what goes over the wire, what comes back, and what the SDK's own types say about both."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from mettle.clients.config import ClientConfig
from mettle.clients.dialects.messages import wire_conversation
from mettle.clients.endpoint_clients import AnthropicMessagesClient
from mettle.clients.errors import (
    AuthenticationError,
    EmptyModelResponseError,
    InvalidModelResponseError,
    ModelError,
    OverlongPromptError,
)
from mettle.clients.factory import client_from
from mettle.clients.transport import RetryPolicy
from mettle.errors import UserError
from mettle.records.messages import Tool, messages_from

USAGE = {"input_tokens": 10, "output_tokens": 4, "cache_read_input_tokens": 30, "cache_creation_input_tokens": 5}


def answer(*blocks, stop_reason="end_turn"):
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": list(blocks),
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": USAGE,
    }


CONVERSATION = messages_from(
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [
            {"type": "text", "text": "what is this?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        ]},
        {
            "role": "assistant",
            "content": "let me look",
            "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
            "tool_calls": [
                {"id": "t1", "name": "look", "arguments": '{"at": 1}'},
                {"id": "t2", "name": "look", "arguments": '{"at": 2}'},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a cat"},
        {"role": "tool", "tool_call_id": "t2", "content": [{"type": "text", "text": "a dog"}]},
        {"role": "user", "content": "so?"},
    ]
)  # fmt: skip
TOOL = Tool(name="look", description="Look.", parameters={"type": "object", "properties": {"at": {"type": "integer"}}})


async def test_a_whole_conversation_goes_out_in_the_apis_own_shape(anthropic, endpoint):
    endpoint.answers = [answer({"type": "text", "text": "a cat and a dog"})]
    client = AnthropicMessagesClient(endpoint.url)
    sampling = {"n": 1, "max_tokens": 7, "temperature": 0.5, "stop": "END", "seed": 3, "extra_body": {"top_k": 5}}
    response = await client.get_response(CONVERSATION, "m", sampling, [TOOL])
    await client.close()
    sent = endpoint.requests[0]
    assert sent["system"] == "be brief"
    assert [turn["role"] for turn in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["messages"][0]["content"][1:] == [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
    ]
    assert [block["type"] for block in sent["messages"][1]["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert sent["messages"][1]["content"][2] == {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}}
    assert [block["type"] for block in sent["messages"][2]["content"]] == ["tool_result", "tool_result", "text"]
    assert {key: sent[key] for key in ("max_tokens", "temperature", "stop_sequences", "top_k")} == {
        "max_tokens": 7, "temperature": 0.5, "stop_sequences": ["END"], "top_k": 5,
    }  # fmt: skip
    assert not {"n", "seed", "stop"} & set(sent)
    TypeAdapter(list[anthropic.types.MessageParam]).validate_python(sent["messages"])
    TypeAdapter(list[anthropic.types.ToolParam]).validate_python(sent["tools"])
    assert response.message.content == "a cat and a dog"
    assert response.message.finish_reason == "stop"
    assert response.usage.prompt_tokens == 45
    assert (response.usage.cached_tokens, response.usage.completion_tokens) == (30, 4)


async def test_tool_calls_and_thoughts_are_read_and_go_back_as_they_came(anthropic, endpoint):
    thought = {"type": "thinking", "thinking": "I should look", "signature": "sig"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    call = {"type": "tool_use", "id": "t9", "name": "look", "input": {"at": 3, "what": "é"}}
    endpoint.answers = [answer(thought, hidden, call, stop_reason="tool_use")]
    anthropic.types.Message.model_validate(endpoint.answers[0])
    client = AnthropicMessagesClient(endpoint.url)
    message = (await client.get_response(CONVERSATION, "m", {}, [TOOL])).message
    await client.close()
    assert message.content is None
    assert message.reasoning_content.startswith("I should look")
    assert message.finish_reason == "tool_calls"
    assert message.tool_calls[0].arguments == '{"at": 3, "what": "é"}'
    _, turns = wire_conversation([message.to_assistant()])
    assert turns == [{"role": "assistant", "content": [thought, hidden, call]}]


async def test_a_cut_answer_is_truncated_and_a_context_overflow_is_not_an_error_of_the_provider(endpoint):
    overlong = '{"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}}'
    endpoint.answers = [answer({"type": "text", "text": "a"}, stop_reason="max_tokens"), (400, overlong)]
    client = AnthropicMessagesClient(endpoint.url)
    response = await client.get_response(CONVERSATION, "m")
    assert response.message.is_truncated
    assert response.message.finish_reason == "length"
    with pytest.raises(OverlongPromptError, match="prompt is too long"):
        await client.get_response(CONVERSATION, "m")
    await client.close()


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (answer(), EmptyModelResponseError),
        ({"type": "message"}, InvalidModelResponseError),
        ((401, '{"type": "error", "error": {"message": "no"}}'), AuthenticationError),
        ((529, '{"type": "error", "error": {"message": "Overloaded"}}'), ModelError),
    ],
)
async def test_what_is_no_answer_is_an_error_that_names_the_url(endpoint, reply, kind):
    endpoint.answers = [reply]
    client = AnthropicMessagesClient(endpoint.url)
    client.endpoint.transport.retry = RetryPolicy(max_retries=0)
    with pytest.raises(kind, match="/v1/messages"):
        await client.get_response(CONVERSATION, "m")
    await client.close()


async def test_a_key_goes_in_anthropics_header_and_the_base_url_may_leave_out_v1(endpoint, monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "k1")
    endpoint.answers = [answer({"type": "text", "text": "hi"})]
    config = ClientConfig(endpoint.url.removesuffix("/v1"), "SECRET_OF_MINE", "anthropic_messages")
    client = client_from(config)
    await client.get_response(CONVERSATION, "m")
    await client.close()
    assert isinstance(client, AnthropicMessagesClient)
    headers = {name.lower(): value for name, value in endpoint.headers[0].items()}
    assert headers["x-api-key"] == "k1"
    assert headers["anthropic-version"]
    assert "authorization" not in headers
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(UserError, match="ANTHROPIC_API_KEY"):
        AnthropicMessagesClient(ClientConfig())


async def test_an_sdk_object_serves_as_well_as_a_url(anthropic, endpoint):
    endpoint.answers = [answer({"type": "text", "text": "hi"}), (400, '{"error": {"message": "prompt is too long"}}')]
    async with anthropic.AsyncAnthropic(
        base_url=endpoint.url.removesuffix("/v1"), api_key="k", max_retries=0
    ) as native:
        client = client_from(native)
        response = await client.get_response(CONVERSATION, "m", {"temperature": 1.0, "n": 1}, [TOOL])
        assert response.message.content == "hi"
        assert endpoint.requests[0]["tools"][0]["input_schema"] == TOOL.parameters
        with pytest.raises(OverlongPromptError):
            await client.get_response(CONVERSATION, "m")


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("auto", {"type": "auto"}),
        ("required", {"type": "any"}),
        ({"type": "function", "function": {"name": "look"}}, {"type": "tool", "name": "look"}),
        ({"type": "tool", "name": "look"}, {"type": "tool", "name": "look"}),
    ],
)
async def test_a_tool_choice_is_translated(endpoint, given, sent):
    endpoint.answers = [answer({"type": "text", "text": "hi"})]
    client = AnthropicMessagesClient(endpoint.url)
    await client.get_response(CONVERSATION, "m", {"tool_choice": given, "parallel_tool_calls": False}, [TOOL])
    await client.close()
    assert endpoint.requests[0]["tool_choice"] == {**sent, "disable_parallel_tool_use": True}


async def test_several_answers_a_request_are_refused_rather_than_silently_one(endpoint):
    client = AnthropicMessagesClient(endpoint.url)
    with pytest.raises(ModelError, match="n=4"):
        await client.get_response(CONVERSATION, "m", {"n": 4})
    await client.close()
