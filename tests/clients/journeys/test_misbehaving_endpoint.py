"""Endpoints that do everything wrong: each call ends as an answer or as one attributed error of one line."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import mettle.envs as vf
from mettle.clients.endpoint_clients import OpenAIChatCompletionsClient, OpenAICompletionsClient
from mettle.clients.errors import (
    AuthenticationError,
    EmptyModelResponseError,
    InvalidModelResponseError,
    ModelError,
    NotFoundError,
    RateLimitError,
)
from mettle.clients.transport import ModelTransport, RetryPolicy
from mettle.clients.wire import decoded, encoded, well_formed
from mettle.errors import ProviderError, UserError

PROMPT = [vf.UserMessage(content="hello")]


def said(content="yes", **message):
    return {"choices": [{"message": {"content": content, **message}, "finish_reason": "stop"}]}


def chat(url, **options) -> OpenAIChatCompletionsClient:
    async def no_wait(_: float) -> None:
        return None

    client = OpenAIChatCompletionsClient(url)
    retry = RetryPolicy(max_retries=2)
    client.endpoint.transport = ModelTransport(url, **{"retry": retry, "sleep": no_wait, **options})
    return client


async def failure_of(client) -> ModelError:
    try:
        with pytest.raises(ProviderError) as caught:
            await client.get_response(PROMPT, "m")
    finally:
        await client.close()
    text = str(caught.value)
    assert client.base_url in text
    assert "\n" not in text
    assert len(text) < 1200
    return caught.value


@pytest.mark.parametrize(
    ("answer", "kind", "says", "num_requests"),
    [
        ((401, '{"error": {"message": "Incorrect\\nkey"}}'), AuthenticationError, "Incorrect key (check", 1),
        ((403, "<html>\n<b>no</b>\n</html>"), AuthenticationError, "<html> <b>no</b> </html>", 1),
        ((404, '{"error": {"message": "The model `m` does not exist"}}'), NotFoundError, "(check the model's name", 1),
        ((429, "slow down"), RateLimitError, "slow down", 3),
        ((500, "Traceback:\n  File\n" + "x" * 10_000), ModelError, "Traceback: File", 3),
        ((502, "<html>Bad Gateway</html>"), ModelError, "status 502", 3),
        ((200, "\x00\x01garbage\n\n"), InvalidModelResponseError, "not JSON", 2),
        ((200, 'data: {"choices": []}\n\ndata: [DONE]\n'), InvalidModelResponseError, "not JSON: 'data:", 2),
        ((200, "[" * 100_000), InvalidModelResponseError, "not JSON", 2),
        ((200, '"text"'), InvalidModelResponseError, "a JSON str, no object", 2),
        ({}, InvalidModelResponseError, "without choices", 1),
        ({"choices": []}, InvalidModelResponseError, "without choices", 1),
        ({"choices": {"0": {}}}, InvalidModelResponseError, "without choices", 1),
        ({"choices": [None]}, InvalidModelResponseError, "without choices", 1),
        ({"choices": [{}]}, InvalidModelResponseError, "without a message", 1),
        ({"error": {"message": "no\ncapacity", "code": 429}}, InvalidModelResponseError, "no capacity", 1),
        (said(None), EmptyModelResponseError, "no text, no reasoning", 1),
        (said(7), InvalidModelResponseError, "the content is a JSON int", 1),
        (said({"text": "x"}), InvalidModelResponseError, "the content is a JSON dict", 1),
        (said(tool_calls="f()"), InvalidModelResponseError, "cannot be read", 1),
        (said(tool_calls=[None]), InvalidModelResponseError, "cannot be read", 1),
        (said(tool_calls=[{"function": "f"}, 3]), InvalidModelResponseError, "cannot be read", 1),
        ({**said(), "usage": {"prompt_tokens": "many"}}, InvalidModelResponseError, "cannot be read (ValueError", 1),
        (
            {
                **said(),
                "prompt_token_ids": [1],
                "choices": [{"message": {"content": "a"}, "token_ids": [2], "logprobs": {"content": [{}]}}],
            },
            InvalidModelResponseError,
            "cannot be read (KeyError",
            1,
        ),
        ("half", ModelError, "ClientPayloadError", 3),
        ("hang up", ModelError, "ServerDisconnected", 3),
    ],
)
async def test_each_kind_of_nonsense_is_one_error_of_one_line(endpoint, answer, kind, says, num_requests):
    endpoint.answers = [answer]
    error = await failure_of(chat(endpoint.url))
    assert type(error) is kind
    assert says in str(error)
    assert len(endpoint.requests) == num_requests
    assert error.kind == "provider"


@pytest.mark.parametrize(
    "answer", [{"choices": [{"text": None}]}, {"choices": [{"text": "a", "logprobs": {"content": 3}}]}]
)
async def test_text_completions_are_read_as_carefully(endpoint, answer):
    endpoint.answers = [{**answer, "prompt_token_ids": [1], "choices": [{**answer["choices"][0], "token_ids": [2]}]}]
    client = OpenAICompletionsClient(endpoint.url)
    with pytest.raises(InvalidModelResponseError):
        await client.get_response(PROMPT, "m")
    await client.close()


async def test_a_wrong_content_type_around_a_right_answer_is_forgiven(endpoint):
    endpoint.answers = [(200, json.dumps(said("fine")), {"Content-Type": "text/html"})]
    client = chat(endpoint.url)
    assert (await client.get_response(PROMPT, "m")).message.content == "fine"
    await client.close()


async def test_ten_megabytes_of_completion_arrive_whole(endpoint):
    endpoint.answers = [said("x" * 10_000_000)]
    client = chat(endpoint.url)
    assert len((await client.get_response(PROMPT, "m")).message.content) == 10_000_000
    await client.close()


async def test_an_answer_without_end_is_cut_off(endpoint):
    endpoint.answers = [said("x" * 3_000_000)]
    error = await failure_of(chat(endpoint.url, max_body_bytes=1 << 20))
    assert "more than 1 MiB of answer" in str(error)
    assert len(endpoint.requests) == 1


async def test_nobody_asks_for_a_stream_that_nobody_reads(endpoint):
    endpoint.answers = [said()]
    client = chat(endpoint.url)
    await client.get_response(PROMPT, "m", {"stream": True, "stream_options": {"include_usage": True}, "seed": 1})
    await client.close()
    assert set(endpoint.requests[0]) == {"model", "messages", "seed"}


async def test_a_key_with_a_line_break_at_its_end_works_and_one_within_is_told(endpoint):
    endpoint.answers = [said()]
    client = chat(endpoint.url, api_key="secret\n")
    await client.get_response(PROMPT, "m")
    await client.close()
    assert endpoint.headers[0]["Authorization"] == "Bearer secret"
    error = await failure_of(chat(endpoint.url, headers={"X-Team": "a\nb"}))
    assert "cannot be sent" in str(error)


async def test_a_request_that_has_no_json_is_an_error_and_is_not_sent(endpoint):
    client = chat(endpoint.url)
    with pytest.raises(ModelError, match=r"the request has no JSON: .*set"):
        await client.get_response(PROMPT, "m", {"stop": {"a"}})
    assert endpoint.requests == []


# Endpoints that break the protocol itself

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def raw() -> AsyncIterator[Callable[[Peer], Awaitable[str]]]:
    servers = []

    async def serve(peer: Peer) -> str:
        server = await asyncio.start_server(peer, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"

    yield serve
    for server in servers:
        server.close()


async def _request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)


async def resets(reader, writer):
    await _request(reader)
    import socket
    import struct

    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def speaks_no_http(reader, writer):
    await _request(reader)
    writer.write(b"220 mail ready\r\n")
    writer.close()


async def breaks_its_chunks(reader, writer):
    await _request(reader)
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n")
    writer.close()


async def lies_about_gzip(reader, writer):
    await _request(reader)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nplain")
    writer.close()


@pytest.mark.parametrize("peer", [resets, speaks_no_http, breaks_its_chunks, lies_about_gzip])
async def test_a_broken_protocol_is_tried_again_and_then_an_error(raw, peer):
    num_calls = []

    async def counted(reader, writer):
        num_calls.append(1)
        await peer(reader, writer)

    await failure_of(chat(await raw(counted)))
    assert len(num_calls) == 3


async def test_a_connection_that_is_reset_once_costs_a_retry_and_no_rollout(raw):
    num_calls = []
    body = json.dumps(said("after all")).encode()

    async def once(reader, writer):
        num_calls.append(1)
        if len(num_calls) == 1:
            return await resets(reader, writer)
        await _request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()
        return None

    client = chat(await raw(once))
    assert (await client.get_response(PROMPT, "m")).message.content == "after all"
    await client.close()


async def test_a_drip_that_never_ends_is_over_when_the_time_is_up(raw):
    async def drips(reader, writer):
        await _request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.01)

    error = await failure_of(chat(await raw(drips), timeout_s=0.2))
    assert "no answer within 0.2 s" in str(error)


async def test_silence_is_over_when_the_time_is_up(raw):
    async def waits(reader, writer):
        await _request(reader)
        await reader.read()
        writer.close()

    error = await failure_of(chat(await raw(waits), timeout_s=0.1))
    assert "no answer within 0.1 s" in str(error)


# Text that is no text

LONE = json.loads('"a\\ud83d"')
PAIR = "\U0001f600"


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b'"a\\ud83d"', "a\ufffd"),
        (b'"\\uDE00b"', "\ufffdb"),
        (b'"\\ud83d\\ude00"', PAIR),
        (b'"\xed\xa0\xbd"', "\ufffd"),
        ('"한국"'.encode(), "한국"),
    ],
)
def test_half_a_character_comes_in_as_the_sign_for_a_lost_one(payload, text):
    assert decoded(payload) == text
    assert decoded(b'{"k": [{"t": ' + payload + b"}]}") == {"k": [{"t": text}]}
    decoded(payload).encode()


def test_half_a_character_leaves_as_the_sign_for_a_lost_one():
    assert json.loads(encoded({"t": LONE, "u": PAIR})) == {"t": "a\ufffd", "u": PAIR}
    assert well_formed({LONE: 1}) == {"a\ufffd": 1}


async def test_surrogates_in_both_directions_break_neither_request_nor_results(endpoint, tmp_path):
    endpoint.answers = [(200, '{"choices": [{"message": {"content": "cut \\ud83d"}, "finish_reason": "stop"}]}')]
    env = vf.SingleTurnEnv(eval_dataset=[{"question": f"half {LONE}"}], rubric=vf.Rubric([lambda completion: 1.0]))
    client = chat(endpoint.url)
    state = await env.run_rollout(env.get_eval_dataset()[0], client, "m")
    await client.close()
    assert endpoint.requests[0]["messages"][0]["content"] == "half a\ufffd"
    assert state["completion"][0]["content"] == "cut \ufffd"
    assert state["reward"] == 1.0


# Whole evaluations


def _env(num=20):
    return vf.SingleTurnEnv(
        eval_dataset=[{"question": f"q{i}"} for i in range(num)], rubric=vf.Rubric([lambda completion: 1.0])
    )


@pytest.mark.parametrize("answer", [(401, "bad key"), (403, "not you"), (404, "no such model")])
async def test_a_refused_key_or_model_ends_an_evaluation_with_one_line(endpoint, tmp_path, answer):
    endpoint.answers = [answer]
    client = chat(endpoint.url)
    with pytest.raises(UserError) as caught:
        await _env().evaluate(client, "m", max_concurrent=2, results_path=tmp_path)
    await client.close()
    assert f"status {answer[0]}: {answer[1]}" in str(caught.value)
    assert "so the evaluation ended here" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(endpoint.requests) <= 4


async def test_a_refusal_among_successes_is_one_rollouts_own(endpoint):
    refused = iter([False, True])
    endpoint.answers = [lambda _: (403, "moderated") if next(refused, False) else said()]
    client = chat(endpoint.url)
    results = await _env(5).evaluate(client, "m", max_concurrent=1)
    await client.close()
    assert results.reward.count(None) == 1
    assert results.reward.count(1.0) == 4


async def test_a_judge_without_a_key_ends_an_evaluation_with_one_line(endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    endpoint.answers = [said()]
    rubric = vf.JudgeRubric()

    async def by_judge(judge, prompt, completion, answer):
        return float("yes" in await judge(prompt, completion, answer))

    rubric.add_reward_func(by_judge)
    env = vf.SingleTurnEnv(eval_dataset=[{"question": f"q{i}"} for i in range(20)], rubric=rubric)
    client = chat(endpoint.url)
    with pytest.raises(
        UserError, match=r"by_judge: judge gpt-4.1-nano: .* set the environment variable OPENAI_API_KEY"
    ):
        await env.evaluate(client, "m", max_concurrent=1)
    await client.close()
    assert len(endpoint.requests) == 1


class Failing:
    """An `AsyncOpenAI` whose endpoint answers with `status`."""

    base_url = "http://sdk/v1"

    def __init__(self, status):
        class Completions:
            async def create(self, **body):
                error = RuntimeError("over\nthere")
                error.status_code = status
                raise error

        self.chat = type("Chat", (), {"completions": Completions()})()


@pytest.mark.parametrize(
    ("status", "kind"), [(401, AuthenticationError), (404, NotFoundError), (429, RateLimitError), (None, ModelError)]
)
async def test_failures_of_somebodys_sdk_are_attributed_alike(status, kind):
    with pytest.raises(ModelError, match=r"POST http://sdk/v1: .*over there") as caught:
        await OpenAIChatCompletionsClient(Failing(status)).get_response(PROMPT, "m")
    assert type(caught.value) is kind


async def test_what_is_tried_again_is_logged_without_the_prompt(endpoint, caplog):
    caplog.set_level(logging.INFO)
    endpoint.answers = [(500, "oops"), said()]
    client = chat(endpoint.url)
    await client.get_response(PROMPT, "m")
    await client.close()
    assert any("trying again" in record.message for record in caplog.records)
    assert "hello" not in caplog.text
