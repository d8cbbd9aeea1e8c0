"""The Responses API: items out, items in, thoughts that go back as they came."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from mettle.clients.config import ClientConfig
from mettle.clients.dialects.responses import wire_items
from mettle.clients.endpoint_clients import OpenAIResponsesClient
from mettle.clients.errors import EmptyModelResponseError, InvalidModelResponseError, ModelError
from mettle.clients.factory import client_from
from mettle.records.messages import Tool, messages_from

TEXT = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "hi", "annotations": []}],
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "look",
    "arguments": '{"at": 1}',
    "status": "completed",
}
TOOL = Tool(name="look", description="Look.", parameters={"type": "object", "properties": {}})
PROMPT = messages_from(
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [
            {"type": "text", "text": "what is this?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD", "detail": "low"}},
        ]},
        {"role": "assistant", "content": "wait", "tool_calls": [{"id": "c0", "name": "look", "arguments": "{}"}]},
        {"role": "tool", "tool_call_id": "c0", "content": "a cat"},
    ]
)  # fmt: skip


def answer(*items, **fields):
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": "completed",
        "output": list(items),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 9,
            "output_tokens": 5,
            "total_tokens": 14,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 3},
        },
        **fields,
    }


async def test_a_conversation_goes_out_as_items(openai, endpoint):
    endpoint.answers = [answer(TEXT)]
    client = OpenAIResponsesClient(endpoint.url)
    sampling = {"n": 1, "max_completion_tokens": 7, "temperature": 0.5, "reasoning_effort": "low", "seed": 1}
    response = await client.get_response(PROMPT, "m", sampling, [TOOL])
    await client.close()
    sent = endpoint.requests[0]
    assert [item["type"] for item in sent["input"]] == [
        "message", "message", "message", "function_call", "function_call_output",
    ]  # fmt: skip
    assert sent["input"][1]["content"][1] == {
        "type": "input_image", "image_url": "data:image/png;base64,QUJD", "detail": "low",
    }  # fmt: skip
    assert sent["input"][4] == {"type": "function_call_output", "call_id": "c0", "output": "a cat"}
    assert sent["tools"][0]["strict"] is False
    assert (sent["max_output_tokens"], sent["reasoning"]) == (7, {"effort": "low"})
    assert not {"n", "seed", "max_completion_tokens"} & set(sent)
    TypeAdapter(openai.types.responses.ResponseInputParam).validate_python(sent["input"])
    openai.types.responses.Response.model_validate(endpoint.answers[0])
    assert response.message.content == "hi"
    usage = response.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens) == (9, 5, 2, 3)


async def test_thoughts_and_calls_are_read_and_go_back_verbatim_unless_somebody_edited_the_message(endpoint):
    endpoint.answers = [answer(THOUGHT, TEXT, CALL)]
    client = OpenAIResponsesClient(endpoint.url)
    message = (await client.get_response(PROMPT, "m", {}, [TOOL])).message
    await client.close()
    assert (message.content, message.reasoning_content, message.finish_reason) == ("hi", "hm", "tool_calls")
    assert message.tool_calls[0] == {"id": "c1", "name": "look", "arguments": '{"at": 1}'}
    said = message.to_assistant()
    assert wire_items([said]) == [THOUGHT, TEXT, CALL]
    said["content"] = "bye"
    assert [item["type"] for item in wire_items([said])] == ["message", "function_call"]
    assert wire_items([said])[0]["content"] == "bye"


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (answer(), EmptyModelResponseError, "no text"),
        (answer(status="failed", error={"code": "server_error", "message": "it broke"}), ModelError, "it broke"),
        ({"id": "x"}, InvalidModelResponseError, "without output items"),
    ],
)
async def test_what_is_no_answer_is_an_error(endpoint, reply, kind, words):
    endpoint.answers = [reply]
    client = OpenAIResponsesClient(endpoint.url)
    with pytest.raises(kind, match=words):
        await client.get_response(PROMPT, "m")
    await client.close()


async def test_an_incomplete_answer_is_truncated(endpoint):
    endpoint.answers = [answer(TEXT, status="incomplete", incomplete_details={"reason": "max_output_tokens"})]
    client = client_from(ClientConfig(endpoint.url, client_type="openai_responses"))
    message = (await client.get_response(PROMPT, "m")).message
    await client.close()
    assert message.is_truncated
    assert message.finish_reason == "length"


async def test_what_the_api_cannot_do_is_refused_rather_than_dropped(endpoint):
    client = OpenAIResponsesClient(endpoint.url)
    for impossible in ({"n": 2}, {"stop": ["x"]}):
        with pytest.raises(ModelError):
            await client.get_response(PROMPT, "m", impossible)
    await client.close()


async def test_an_sdk_object_serves_as_well_as_a_url(openai, endpoint):
    endpoint.answers = [answer(THOUGHT, TEXT)]
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key="k", max_retries=0) as native:
        response = await OpenAIResponsesClient(native).get_response(PROMPT, "m", {"max_tokens": 5}, [TOOL])
    assert response.message.content == "hi"
    assert response.message.reasoning_content == "hm"
    assert endpoint.requests[0]["max_output_tokens"] == 5
