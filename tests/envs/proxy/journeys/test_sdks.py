"""The real SDKs as agents: every dialect, streamed and whole, with tools, thoughts and images."""

from __future__ import annotations

import pytest

CALL = {"id": "call_1", "name": "look", "arguments": '{"at": 1, "what": "é"}'}
SAID = {"content": "a cat", "reasoning_content": "hm", "tool_calls": [CALL], "finish_reason": "tool_calls"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
PNG = "data:image/png;base64,QUJD"


@pytest.fixture
def says(scripted):
    """A model that thinks, speaks and calls a tool, then says that it is done."""

    def say(prompt):
        return dict(SAID) if len(prompt) < 4 else "done"

    return scripted(say)


CHAT_TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}]
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": PNG}}]},
]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_chat_completions_through_the_openai_sdk(proxied, says, is_stream):
    rollout = await proxied.rollout(says)
    async with rollout.openai() as client:
        if is_stream:
            text, reasoning, arguments, usage, ends = "", "", "", None, []
            async with await client.chat.completions.create(
                model="gpt", messages=CHAT, tools=CHAT_TOOLS, stream=True, stream_options={"include_usage": True}
            ) as chunks:
                async for chunk in chunks:
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                        for call in choice.delta.tool_calls or ():
                            assert (call.id, call.function.name) == ("call_1", "look")
                            arguments += call.function.arguments
                        ends.append(choice.finish_reason)
            assert (text, reasoning, arguments) == ("a cat", "hm", CALL["arguments"])
            assert [end for end in ends if end] == ["tool_calls"]
            assert usage.prompt_tokens == 10
            said = {"role": "assistant", "content": text, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}]}  # fmt: skip
        else:
            answer = await client.chat.completions.create(model="gpt", messages=CHAT, tools=CHAT_TOOLS)
            message = answer.choices[0].message
            assert (message.content, message.reasoning_content) == ("a cat", "hm")
            assert answer.choices[0].finish_reason == "tool_calls"
            assert answer.model == "gpt"
            assert answer.usage.total_tokens == 13
            said = message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": "call_1", "content": "it purrs"}
        last = await client.chat.completions.create(model="gpt", messages=[*CHAT, said, result], tools=CHAT_TOOLS)
        assert last.choices[0].message.content == "done"
        assert last.choices[0].finish_reason == "stop"
        assert [model.id async for model in await client.models.list()] == ["policy"]
    check_steps(rollout, says)


def check_steps(rollout, says):
    """Both calls are steps; the second one's history is the very message that was sampled, thought included."""
    first, second = rollout.steps
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert first["prompt"][1]["content"][1] == {"type": "image_url", "image_url": {"url": PNG}}
    assert first["completion"] == [
        {key: SAID[key] for key in ("content", "reasoning_content", "tool_calls")} | {"role": "assistant"}
    ]
    assert second["prompt"][2] is first["completion"][0]
    assert second["prompt"][:2] == first["prompt"]
    assert all(ours is theirs for ours, theirs in zip(second["prompt"], first["prompt"], strict=False))
    assert second["prompt"][3] == {"role": "tool", "tool_call_id": "call_1", "content": "it purrs"}
    assert [call["tools"][0].name for call in says.calls] == ["look", "look"]
    assert says.calls[0]["tools"][0].parameters == SCHEMA
    assert rollout.state["usage"] == {"input_tokens": 20, "output_tokens": 6}


ANTHROPIC_TOOLS = [{"name": "look", "description": "Look.", "input_schema": SCHEMA}]
ANTHROPIC = [
    {"role": "user", "content": [
        {"type": "text", "text": "what?", "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}},
    ]}
]  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
async def test_messages_through_the_anthropic_sdk(proxied, says, is_stream):
    rollout = await proxied.rollout(says)
    options = {"model": "claude", "max_tokens": 50, "system": "be brief", "tools": ANTHROPIC_TOOLS}
    async with rollout.anthropic() as client:
        if is_stream:
            async with client.messages.stream(messages=ANTHROPIC, **options) as stream:
                kinds = [event.type async for event in stream]
                message = await stream.get_final_message()
            assert kinds[0] == "message_start"
            assert kinds[-1] == "message_stop"
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
        else:
            message = await client.messages.create(messages=ANTHROPIC, **options)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[0].thinking == "hm"
        assert message.content[2].input == {"at": 1, "what": "é"}
        assert message.stop_reason == "tool_use"
        assert (message.usage.input_tokens, message.usage.output_tokens) == (10, 3)
        told = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "it purrs"}]}
        history = [
            {"role": "user", "content": [{**ANTHROPIC[0]["content"][0], "cache_control": None}, ANTHROPIC[0]["content"][1]]},
            {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in message.content if b.type != "thinking"]},
            {"role": "user", "content": [told]},
        ]  # fmt: skip
        last = await client.messages.create(messages=history, **options)
        assert last.content[0].text == "done"
        assert last.stop_reason == "end_turn"
    check_steps(rollout, says)
    assert says.calls[0]["sampling_args"]["max_tokens"] == 50


RESPONSES_TOOLS = [{"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA, "strict": False}]
RESPONSES = [
    {"role": "user", "content": [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": PNG, "detail": "auto"}]}
]  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_responses_through_the_openai_sdk(proxied, says, is_stream, by_id):
    rollout = await proxied.rollout(says)
    options = {"model": "gpt", "instructions": "be brief", "tools": RESPONSES_TOOLS}
    async with rollout.openai() as client:
        if is_stream:
            async with client.responses.stream(input=RESPONSES, **options) as stream:
                numbers = [event.sequence_number async for event in stream]
                answer = await stream.get_final_response()
            assert numbers == list(range(len(numbers)))
        else:
            answer = await client.responses.create(input=RESPONSES, **options)
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.output_text == "a cat"
        assert answer.output[0].summary[0].text == "hm"
        assert answer.output[2].arguments == CALL["arguments"]
        assert (answer.status, answer.usage.total_tokens) == ("completed", 13)
        result = {"type": "function_call_output", "call_id": "call_1", "output": "it purrs"}
        if by_id:
            last = await client.responses.create(input=[result], previous_response_id=answer.id, **options)
        else:
            kept = [item.model_dump(exclude_none=True) for item in answer.output]
            last = await client.responses.create(input=[*RESPONSES, *kept, result], **options)
        assert last.output_text == "done"
    check_steps(rollout, says)


async def test_a_tool_of_free_text_is_called_back_as_one(proxied, scripted):
    call = {"id": "c1", "name": "apply_patch", "arguments": '{"input": "*** Begin"}'}
    model = scripted(lambda prompt: {"content": None, "tool_calls": [call]} if len(prompt) == 1 else "done")
    rollout = await proxied.rollout(model)
    tools = [{"type": "custom", "name": "apply_patch", "description": "Patch."}, {"type": "web_search"}]
    async with rollout.openai() as client:
        async with client.responses.stream(model="m", input="go", tools=tools) as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_response()
        assert "response.custom_tool_call_input.done" in kinds
        item = answer.output[0]
        assert (item.type, item.input) == ("custom_tool_call", "*** Begin")
        output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}
        history = [{"role": "user", "content": "go"}, item.model_dump(exclude_none=True), output]
        await client.responses.create(model="m", input=history, tools=tools)
    assert rollout.steps[1]["prompt"][1] is rollout.steps[0]["completion"][0]
    assert [tool.name for tool in model.calls[0]["tools"]] == ["apply_patch"]


async def test_a_cut_answer_says_so_in_every_dialect(proxied, scripted):
    model = scripted(lambda _: {"content": "a", "finish_reason": "length", "is_truncated": True})
    rollout = await proxied.rollout(model)
    async with rollout.openai() as client, rollout.anthropic() as other:
        chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
        response = await client.responses.create(model="m", input="q")
        message = await other.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "q"}])
        async with client.responses.stream(model="m", input="q") as stream:
            assert [event.type async for event in stream][-1] == "response.incomplete"
    assert chat.choices[0].finish_reason == "length"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert message.stop_reason == "max_tokens"
    assert all(step["is_truncated"] for step in rollout.steps)


async def test_after_the_limit_every_dialect_says_that_the_rollout_is_over_and_no_sdk_tries_again(
    anthropic, openai, proxied, scripted
):
    rollout = await proxied.rollout(scripted("yes"), max_turns=1)
    question = [{"role": "user", "content": "q"}]
    async with rollout.openai(max_retries=5) as client, rollout.anthropic(max_retries=5) as other:
        await client.chat.completions.create(model="m", messages=question)
        with pytest.raises(openai.PermissionDeniedError, match="max_turns_reached"):
            await client.chat.completions.create(model="m", messages=question)
        with pytest.raises(openai.PermissionDeniedError, match="max_turns_reached"):
            await client.responses.create(model="m", input="q")
        with pytest.raises(anthropic.PermissionDeniedError, match="max_turns_reached"):
            await other.messages.create(model="m", max_tokens=5, messages=question)
        with pytest.raises(openai.PermissionDeniedError, match="max_turns_reached"):
            await client.chat.completions.create(model="m", messages=question, stream=True)
    assert rollout.state["stop_condition"] == "max_turns_reached"
    assert rollout.session.num_refused == 4
    assert len(rollout.steps) == 1


async def test_a_context_that_is_full_is_the_agents_to_react_to(anthropic, openai, proxied, scripted):
    from mettle.clients.errors import OverlongPromptError

    model = scripted(lambda prompt: "short" if len(prompt) == 1 else OverlongPromptError("9 > 8 tokens"))
    rollout = await proxied.rollout(model)
    question = [{"role": "user", "content": "q"}]
    async with rollout.openai() as client, rollout.anthropic() as other:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=question * 2)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await other.messages.create(model="m", max_tokens=5, messages=question * 2)
        assert rollout.recorder.is_context_full
        answer = await client.chat.completions.create(model="m", messages=question)
    assert answer.choices[0].message.content == "short"
    assert not rollout.recorder.is_context_full
    assert rollout.state["error"] is None


async def test_a_model_that_fails_ends_the_rollout_and_is_not_asked_again(openai, proxied, scripted):
    from mettle.clients.errors import ModelError

    rollout = await proxied.rollout(scripted(lambda _: ModelError("it is down")))
    async with rollout.openai(max_retries=5) as client:
        with pytest.raises(openai.InternalServerError, match="it is down"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
        with pytest.raises(openai.PermissionDeniedError, match="has_error"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
    assert str(rollout.state["error"]) == "it is down"
    assert rollout.steps == []
    assert rollout.recorder.ended.is_set()
