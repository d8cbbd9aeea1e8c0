"""The official `openai` client against a running server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from policies import END, picked_logprobs, save_adapter, with_adapter

from mettle.clients.renderer import Renderer
from mettle.inference.bridge import Bridge
from mettle.inference.engine.mock import MockEngine
from mettle.inference.server import InferenceServer
from mettle.inference.service import ModelService
from mettle.web.server import bind

if TYPE_CHECKING:
    from openai import AsyncOpenAI

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
async def client(openai: Any, server: InferenceServer) -> AsyncIterator[AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
async def saying(openai: Any, renderer: Renderer) -> AsyncIterator[Any]:
    """A client of a server whose policy says one given text, then the end token."""
    opened: list[tuple[AsyncOpenAI, InferenceServer]] = []

    async def start(text: str) -> AsyncOpenAI:
        engine = MockEngine(lambda prompt, choice: [*renderer.encode(text), END])
        server = InferenceServer(ModelService(Bridge(engine), renderer, "policy"), bind("127.0.0.1", 0))
        await server.start()
        opened.append((openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0), server))
        return opened[-1][0]

    yield start
    for client, server in opened:
        await client.close()
        await server.stop(0)


async def streamed(stream: Any) -> dict[str, Any]:
    """What the deltas of choice 0 add up to."""
    whole: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None, "usage": None}
    async for chunk in stream:
        whole["usage"] = chunk.usage or whole["usage"]
        for choice in chunk.choices:
            if choice.index == 0:
                whole["content"] += choice.delta.content or ""
                whole["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content") or ""
                whole["calls"] += choice.delta.tool_calls or []
                whole["reason"] = choice.finish_reason or whole["reason"]
    return whole


async def test_models_are_listed(openai: Any, client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["policy"]
    assert (await client.models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError, match="not served"):
        await client.models.retrieve("gpt-4")


async def test_an_adapter_is_a_model_of_its_own(
    openai: Any, client: AsyncOpenAI, server: InferenceServer, model: Any, tmp_path: Path
) -> None:
    folder = save_adapter(model, tmp_path / "a")
    await asyncio.to_thread(server.service.engine.load_adapter, "tenant", folder)
    listed = [found async for found in client.models.list()]
    assert [found.id for found in listed] == ["policy", "tenant"]
    assert (listed[1].model_extra or {})["parent"] == "policy"
    assert (await client.models.retrieve("tenant@v0")).id == "tenant@v0"
    merged = with_adapter(model, folder)
    extra = {"return_token_ids": True, "ignore_eos": True}
    for name in ("tenant", "tenant@v0"):
        chat = await client.chat.completions.create(
            model=name, messages=HI, max_tokens=6, seed=1, logprobs=True, extra_body=extra
        )
        assert chat.model == name
        assert chat.model_extra is not None
        ids = [*chat.model_extra["prompt_token_ids"], *(chat.choices[0].model_extra or {})["token_ids"]]
        assert chat.choices[0].logprobs is not None
        found = torch.tensor([entry.logprob for entry in chat.choices[0].logprobs.content or []])
        assert (found - picked_logprobs(merged, ids)[-6:]).abs().mean() <= 1e-5
    text = await client.completions.create(
        model="tenant", prompt="hi", max_tokens=4, logprobs=0, echo=True, extra_body=extra
    )
    ids = [*(text.choices[0].model_extra or {})["prompt_token_ids"], *(text.choices[0].model_extra or {})["token_ids"]]
    assert text.choices[0].logprobs is not None
    found = torch.tensor([value for value in text.choices[0].logprobs.token_logprobs or [] if value is not None])
    assert (found - picked_logprobs(merged, ids)).abs().mean() <= 1e-5
    stream = await client.chat.completions.create(model="tenant", messages=HI, max_tokens=4, seed=1, stream=True)
    assert {chunk.model async for chunk in stream} == {"tenant"}
    with pytest.raises(openai.NotFoundError, match="v7"):
        await client.chat.completions.create(model="tenant@v7", messages=HI)


async def test_chat_gives_choices_usage_logprobs_and_ids(client: AsyncOpenAI, model: Any) -> None:
    answer = await client.chat.completions.create(
        model="policy",
        messages=HI,
        n=2,
        max_tokens=5,
        seed=1,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    prompt = answer.model_extra["prompt_token_ids"]
    assert prompt == [259, 104, 105, END, 260]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 10)
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.model_extra is not None
        ids = choice.model_extra["token_ids"]
        assert choice.model_extra["versions"] == [0] * 5
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 5
        found = torch.tensor([entry.logprob for entry in choice.logprobs.content])
        assert torch.allclose(found, picked_logprobs(model, [*prompt, *ids])[4:], atol=1e-4)


async def test_a_seed_repeats_itself_and_choices_of_n_differ(client: AsyncOpenAI) -> None:
    async def ask(seed: int, n: int = 2) -> list[Any]:
        answer = await client.chat.completions.create(
            model="policy", messages=HI, n=n, max_tokens=8, seed=seed, extra_body={"return_token_ids": True}
        )
        return [choice.model_extra["token_ids"] for choice in answer.choices if choice.model_extra]

    first = await ask(5)
    assert first == await ask(5)
    assert first != await ask(6)
    assert first[0] != first[1]
    assert first[:1] == await ask(5, n=1)


async def test_a_stream_says_what_the_whole_answer_says(client: AsyncOpenAI) -> None:
    common: dict[str, Any] = {"model": "policy", "messages": HI, "max_tokens": 40, "seed": 3}
    whole = await client.chat.completions.create(**common)
    stream = await client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
    told = await streamed(stream)
    assert told["content"] == whole.choices[0].message.content
    assert told["reason"] == whole.choices[0].finish_reason
    assert told["usage"] == whole.usage


async def test_pieces_of_a_stream_say_what_was_used_so_far_where_that_is_asked_for(
    openai: Any, client: AsyncOpenAI
) -> None:
    common: dict[str, Any] = {"messages": HI, "max_tokens": 8, "seed": 3, "extra_body": {"ignore_eos": True}}
    options: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(**common, model="policy", stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    nums = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(nums) == len(chunks)
    assert nums == sorted(nums)
    assert (nums[0], nums[-1]) == (0, 8)
    assert len(set(nums)) > 2
    assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage} == {chunks[-1].usage.prompt_tokens}
    options = {"continuous_usage_stats": "yes"}
    with pytest.raises(openai.BadRequestError, match="continuous_usage_stats"):
        await client.chat.completions.create(**common, model="policy", stream=True, stream_options=options)


async def test_tool_calls_are_parsed_when_tools_are_offered(saying: Any) -> None:
    client = await saying(f"let me see\n{CALL}\n{CALL}")
    answer = await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS)
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == ("let me see", "tool_calls")
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [("add", {"a": 1})] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    back = [*HI, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "x", "content": "1"}]
    assert (await client.chat.completions.create(model="policy", messages=back, tools=TOOLS)).choices


async def test_tool_calls_are_left_alone_without_tools_or_when_not_wanted(saying: Any) -> None:
    client = await saying(CALL)
    assert (await client.chat.completions.create(model="policy", messages=HI)).choices[0].message.content == CALL
    answer = await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS, tool_choice="none")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")


@pytest.mark.parametrize(
    "text",
    [
        f"<think>\nhm\n\nso\n</think>\n\nlet me see\n{CALL}",
        f"<think>hm</think>{CALL}{CALL}",
        "<think>never closed",
        f"{CALL} and <tool_call> that is broken",
        "plain with a < and a <tool_ca in it\n",
        "two bytes: é, four: \N{GRINNING FACE}",
        "",
    ],
)
async def test_a_stream_of_thoughts_and_calls_equals_the_whole(saying: Any, text: str) -> None:
    client = await saying(text)
    whole = (await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS)).choices[0]
    told = await streamed(await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS, stream=True))
    assert told["content"] == (whole.message.content or "")
    assert told["reasoning"] == ((whole.message.model_extra or {}).get("reasoning_content") or "")
    wanted = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in told["calls"]] == wanted
    assert told["reason"] == whole.finish_reason


async def test_a_stop_string_ends_the_text_before_it(client: AsyncOpenAI) -> None:
    common: dict[str, Any] = {"model": "policy", "prompt": "abc", "max_tokens": 40, "seed": 4}
    text = (await client.completions.create(**common)).choices[0].text
    stop = text[10:12]
    stopped = (await client.completions.create(**common, stop=stop)).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text.partition(stop)[0], "stop")
    stream = await client.completions.create(**common, stop=stop, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == stopped.text


async def test_completions_take_token_ids_and_several_prompts(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="policy", prompt=[[1, 2], [3]], n=2, max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    extras = [choice.model_extra or {} for choice in answer.choices]
    assert [extra["prompt_token_ids"] for extra in extras] == [[1, 2], [1, 2], [3], [3]]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


async def test_echo_scores_the_prompt(client: AsyncOpenAI, model: Any) -> None:
    answer = await client.completions.create(model="policy", prompt="abcd", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "abcd"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c", "d"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    found = torch.tensor(choice.logprobs.token_logprobs[1:])
    assert torch.allclose(found, picked_logprobs(model, list(b"abcd")), atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"264": 5}}, "logit_bias"),
        ({"logit_bias": {"a": 5}}, "logit_bias"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "much"}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: other"}, "guided_grammar"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ],
)
async def test_a_bad_field_is_named(openai: Any, client: AsyncOpenAI, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        body = {"model": "policy", "messages": HI, "stream": stream, **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", body=body, cast_to=object)
        assert caught.value.param == param


async def test_a_long_prompt_has_the_code_that_clients_look_for(openai: Any, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="policy", prompt="x" * 300)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


async def test_another_model_is_not_found(openai: Any, client: AsyncOpenAI) -> None:
    for asked in (
        client.chat.completions.create(model="gpt-4", messages=HI),
        client.completions.create(model="gpt-4", prompt="hi"),
        client.models.retrieve("gpt-4"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await asked
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{2,4}$"}, "size": {"enum": [1, 22]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


async def test_an_answer_keeps_to_its_schema(client: AsyncOpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = await client.chat.completions.create(
        model="policy", messages=HI, n=4, max_tokens=150, response_format=wanted, seed=3
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content or "")
        assert set(found) == {"name", "size"}
        assert found["size"] in (1, 22)
        assert found["name"].isalpha()
    chunks = await client.chat.completions.create(
        model="policy", messages=HI, max_tokens=150, response_format=wanted, seed=3, stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
    assert text == answer.choices[0].message.content


async def test_completions_keep_to_the_fields_of_vllm(client: AsyncOpenAI) -> None:
    async def texts(**fields: Any) -> set[str]:
        answer = await client.completions.create(
            model="policy", prompt="x", n=6, max_tokens=20, seed=1, extra_body=fields
        )
        return {choice.text for choice in answer.choices}

    assert await texts(guided_choice=["left", "right"]) <= {"left", "right"}
    assert await texts(structured_outputs={"choice": ['up "so"', "down"]}) <= {'up "so"', "down"}
    assert all(re.fullmatch(r"[ab]{3}", text) for text in await texts(structured_outputs={"regex": "[ab]{3}"}))
    assert all(re.fullmatch(r"x+;", text) or len(text) == 20 for text in await texts(guided_regex="x+;"))
    assert await texts(guided_grammar='start: "1" | "2" "3"') <= {"1", "23"}
