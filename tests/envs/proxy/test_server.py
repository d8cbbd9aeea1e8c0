"""What agents send that they should not, and what happens to their connections."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest

from mettle.clients import answer_length
from mettle.envs.proxy.sessions import SessionTable

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
MESSAGES = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "q"}]}


async def until(condition):
    """Wait for something that has no event to wait for."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Slow:
    """A gate that lets model calls wait."""

    def __init__(self, scripted, say="yes"):
        self.gate = asyncio.Event()
        self.model = scripted(say)
        answer = self.model.get_response

        async def later(*args, **kwargs):
            self.num_started += 1
            await self.gate.wait()
            return await answer(*args, **kwargs)

        self.num_started = 0
        self.model.get_response = later

    async def started(self, count):
        await until(lambda: self.num_started >= count)


@pytest.mark.parametrize("key", ["", "wrong", "ü" * 40, "x" * 100_000])
async def test_a_wrong_secret_is_refused_in_the_dialect_of_the_call_and_costs_no_model_call(proxied, scripted, key):
    model = scripted("yes")
    rollout = await proxied.rollout(model)
    if len(key) > 8000:
        status, body = 401, None  # a header that long is refused by the HTTP parser, before anybody reads it
        async with (
            aiohttp.ClientSession() as http,
            http.post(rollout.root + CHAT, json=BODY, headers={"x-api-key": key}) as a,
        ):
            assert a.status == 400
    else:
        sent = key.encode().decode("latin-1")
        status, body = await rollout.post(CHAT, BODY, Authorization=f"Bearer {sent}")
        assert body["error"]["code"] == "invalid_api_key"
        status, body = await rollout.post("/v1/messages", MESSAGES, Authorization=f"Bearer {sent}")
        assert body["error"]["type"] == "authentication_error"
    assert status == 401
    assert model.calls == []


async def test_a_page_in_a_browser_is_refused_though_it_had_the_secret(proxied, scripted):
    rollout = await proxied.rollout(scripted("yes"))
    assert (await rollout.post(CHAT, BODY, Host="evil.example"))[0] == 400
    assert (await rollout.post(CHAT, BODY, Origin="https://evil.example"))[0] == 403
    assert rollout.steps == []


async def test_the_secret_may_stand_in_the_path_or_in_either_header(proxied, scripted):
    rollout = await proxied.rollout(scripted("yes"))
    secret = rollout.session.secret
    for path in (f"/rollout/{secret}/v1/chat/completions", f"/rollout/{secret}/chat/completions"):
        assert (await rollout.post(path, BODY, Authorization="Bearer anything"))[0] == 200
    assert (await rollout.post("/v1/messages", MESSAGES, Authorization="", **{"x-api-key": secret}))[0] == 200
    assert len(rollout.steps) == 3


async def test_secrets_are_long_differ_and_end_with_their_rollout(proxied, scripted):
    rollouts = [await proxied.rollout(scripted("yes")) for _ in range(3)]
    secrets = {rollout.session.secret for rollout in rollouts}
    assert len(secrets) == 3
    assert min(map(len, secrets)) >= 43
    first = rollouts[0]
    proxied.proxy.close_session(first.session, "timeout_reached")
    assert (await first.post(CHAT, BODY))[0] == 401
    assert (await rollouts[1].post(CHAT, BODY))[0] == 200
    assert SessionTable().find(first.session.secret) is None


GARBAGE = [
    b"",
    b"{",
    b"\xff\xfe{}",
    b"[1]",
    b"null",
    b'{"messages": NaN}',
    b"[" * 100_000,
    b'{"messages": ' + b"9" * 10_000 + b"}",
    {"messages": []},
    {"messages": "q"},
    {"messages": [1]},
    {"messages": [{"role": "wizard", "content": "q"}]},
    {"messages": [{"role": "user", "content": 7}]},
    {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
    {"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]},
    {**BODY, "n": 2},
    {**BODY, "tools": [{"type": "function"}]},
    {**BODY, "tools": "all"},
    {**BODY, "max_tokens": -1},
    {**BODY, "model": 3},
]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
async def test_garbage_is_refused_with_400_and_the_rollout_goes_on(proxied, scripted, path):
    model = scripted("yes")
    rollout = await proxied.rollout(model)
    for garbage in GARBAGE:
        status, body = await rollout.post(path, garbage)
        if status == 200:  # what one API calls garbage is none of another's business (`n`, say)
            assert path != CHAT, garbage
            continue
        assert status == 400, (garbage, body)
        assert body["error"]["message"]
        assert body["error"]["type"] == "invalid_request_error"
    assert rollout.state["error"] is None
    good = {CHAT: BODY, "/v1/responses": {"model": "m", "input": "q"}, "/v1/messages": MESSAGES}[path]
    assert (await rollout.post(path, good))[0] == 200
    assert len(rollout.session.refusals) <= 20
    assert (await rollout.post("/v1/teapot", BODY))[0] == 404


async def test_ten_megabytes_pass_and_what_is_over_the_limit_is_refused_in_the_dialect(proxied, scripted):
    model = scripted("yes")
    rollout = await proxied.rollout(model)
    long = {"model": "m", "messages": [{"role": "user", "content": "x" * (10 << 20)}]}
    assert (await rollout.post(CHAT, long))[0] == 200
    assert len(model.calls[0]["prompt"][0]["content"]) == 10 << 20
    long["messages"][0]["content"] = "x" * (17 << 20)
    status, body = await rollout.post("/v1/messages", long)
    assert (status, body["error"]["type"]) == (413, "request_too_large")
    assert rollout.session.num_bytes == 0


async def test_lone_surrogates_become_replacement_characters_and_pairs_stay(proxied, scripted):
    model = scripted("yes")
    rollout = await proxied.rollout(model)
    raw = b'{"messages": [{"role": "user", "content": "a\\ud800b \\ud83d\\ude00"}]}'
    assert (await rollout.post(CHAT, raw))[0] == 200
    assert model.calls[0]["prompt"][0]["content"] == "a\ufffdb \U0001f600"
    model.say = lambda _: "bad \ud800 answer"
    status, body = await rollout.post(CHAT, BODY)
    assert (status, body["choices"][0]["message"]["content"]) == (200, "bad \ud800 answer")
    streamed = await read_stream(rollout, {**BODY, "stream": True})
    assert "bad ? answer" in streamed


async def read_stream(rollout, body, path=CHAT):
    headers = {"Authorization": f"Bearer {rollout.session.secret}"}
    async with aiohttp.ClientSession() as http, http.post(rollout.root + path, json=body, headers=headers) as answer:
        return (await answer.read()).decode()


async def test_a_flood_is_held_to_its_share_and_others_are_served(proxied, scripted):
    slow = Slow(scripted)
    flooder = await proxied.rollout(slow.model, max_calls=4)
    other = await proxied.rollout(scripted("yes"))
    calls = [asyncio.create_task(flooder.post(CHAT, {**BODY, "user": str(i)})) for i in range(40)]
    await slow.started(4)
    assert (await other.post(CHAT, BODY))[0] == 200
    slow.gate.set()
    statuses = [status for status, _ in await asyncio.gather(*calls)]
    assert slow.num_started == statuses.count(200) == len(flooder.steps)
    assert statuses.count(429) == 40 - statuses.count(200) > 0
    assert flooder.state["error"] is None


async def test_calls_at_the_same_time_never_pass_the_turn_limit_together(proxied, scripted):
    slow = Slow(scripted)
    rollout = await proxied.rollout(slow.model, max_turns=3)
    calls = [asyncio.create_task(rollout.post(CHAT, {**BODY, "user": str(i)})) for i in range(8)]
    await slow.started(3)
    slow.gate.set()
    statuses = [status for status, _ in await asyncio.gather(*calls)]
    assert sorted(statuses) == [200] * 3 + [403] * 5
    assert slow.num_started == len(rollout.steps) == 3


async def test_an_sdk_that_repeats_a_timed_out_call_gets_the_answer_to_it_and_one_step(proxied, scripted):
    slow = Slow(scripted)
    rollout = await proxied.rollout(slow.model)
    async with rollout.openai(timeout=0.15, max_retries=3) as client:
        call = asyncio.create_task(client.chat.completions.create(**BODY))
        await slow.started(1)
        await until(lambda: rollout.session.num_repeated)
        slow.gate.set()
        assert (await call).choices[0].message.content == "yes"
    assert slow.num_started == 1
    assert len(rollout.steps) == 1


async def test_the_same_question_asked_twice_is_two_samples(proxied, scripted):
    rollout = await proxied.rollout(scripted("yes"))
    for _ in range(2):
        assert (await rollout.post(CHAT, BODY))[0] == 200
    assert (len(rollout.steps), rollout.session.num_repeated) == (2, 0)


async def hang_up_while_waiting(rollout, slow, body, count):
    """Send a call and close the connection before its answer."""
    headers = {"Authorization": f"Bearer {rollout.session.secret}"}
    async with aiohttp.ClientSession() as http:
        call = asyncio.create_task(http.post(rollout.root + CHAT, json=body, headers=headers))
        await slow.started(count)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_an_answer_that_nobody_waited_for_is_no_step_unless_it_is_asked_for_again(proxied, scripted):
    slow = Slow(scripted)
    rollout = await proxied.rollout(slow.model)
    await hang_up_while_waiting(rollout, slow, BODY, 1)
    await hang_up_while_waiting(rollout, slow, {**BODY, "user": "other"}, 2)
    slow.gate.set()
    await until(lambda: not rollout.session.num_requests)
    assert rollout.steps == []
    assert (await rollout.post(CHAT, BODY))[0] == 200
    assert (slow.num_started, len(rollout.steps)) == (2, 1)
    proxied.proxy.close_session(rollout.session, "over")
    assert len(rollout.steps) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_that_broke_off_on_its_way_is_taken_back_or_sent_again(
    proxied, scripted, is_stream, monkeypatch
):
    monkeypatch.setattr(answer_length, "MAX_ANSWER_CHARS", 1 << 30)  # what is on its way fits into no buffer
    model = scripted("x" * (30 << 20))
    rollout = await proxied.rollout(model)
    bodies = [{**BODY, "stream": is_stream, "user": str(i)} for i in range(2)]
    for body in bodies:
        _, writer = await asyncio.open_connection("127.0.0.1", int(rollout.root.rpartition(":")[2]), limit=1024)
        raw = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {rollout.session.secret}\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        count = len(rollout.steps)
        await until(lambda count=count: len(rollout.steps) > count)
        writer.transport.abort()
    await until(lambda: not rollout.session.num_requests)
    assert len(rollout.steps) == 2
    assert (await read_stream(rollout, bodies[0])).count("x") >= 30 << 20
    assert (len(model.calls), rollout.session.num_repeated) == (2, 1)
    proxied.proxy.close_session(rollout.session, "over")
    assert len(rollout.steps) == 1


async def test_a_call_in_flight_is_refused_when_the_rollout_ends(proxied, scripted):
    slow = Slow(scripted)
    rollout = await proxied.rollout(slow.model)
    call = asyncio.create_task(rollout.post(CHAT, BODY))
    headers, streamed = {"Authorization": f"Bearer {rollout.session.secret}"}, {**BODY, "stream": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(rollout.root + CHAT, json=streamed, headers=headers) as stream,
    ):
        assert (await stream.content.readline()).startswith(b": waiting")  # it has begun
        await slow.started(2)
        proxied.proxy.close_session(rollout.session, "timeout_reached")
        status, body = await call
        assert (status, body["error"]["code"]) == (403, "rollout_over")
        assert b"timeout_reached" in await stream.read()
    assert rollout.steps == []


async def test_a_stream_is_kept_alive_while_the_model_thinks(proxied, scripted):
    slow = Slow(scripted)
    rollout = await proxied.rollout(slow.model)

    async def release():
        await asyncio.sleep(0.2)
        slow.gate.set()

    async with rollout.anthropic() as client, asyncio.TaskGroup() as group:
        group.create_task(release())
        async with client.messages.stream(**MESSAGES) as stream:
            message = await stream.get_final_message()
    assert message.content[0].text == "yes"


async def test_a_request_that_never_ends_holds_up_nobody_and_ends_with_the_listener(proxied, scripted):
    rollout = await proxied.rollout(scripted("yes"))
    port = int(rollout.root.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {rollout.session.secret}\r\nContent-Length: 99\r\n\r\n"
    writer.write(head.encode() + b'{"a')
    await writer.drain()
    assert (await rollout.post(CHAT, BODY))[0] == 200
    await proxied.proxy.close()
    async with asyncio.timeout(60):
        assert await reader.read() is not None
    writer.close()


async def test_a_door_into_one_machine_lets_in_nobody_with_another_rollouts_secret(proxied, scripted):
    mine, theirs = await proxied.rollout(scripted("yes")), await proxied.rollout(scripted("yes"))
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    listener = await proxied.proxy.serve(sock, only=mine.session)
    mine.root = theirs.root = f"http://127.0.0.1:{listener.port}"
    assert (await mine.post(CHAT, BODY))[0] == 200
    assert (await theirs.post(CHAT, BODY))[0] == 401
    await proxied.proxy.stop(listener)


async def test_two_hundred_rollouts_at_once_keep_their_calls_apart(proxied, scripted):
    def say(prompt):
        return f"{prompt[0]['content']} turn {len(prompt)}"

    rollouts = [await proxied.rollout(scripted(say)) for _ in range(200)]

    async def agent(http, index, rollout):
        headers = {"Authorization": f"Bearer {rollout.session.secret}"}
        messages = [{"role": "user", "content": f"rollout {index}"}]
        for turn in range(3):
            body = {"model": "m", "messages": messages, "stream": index % 2 == 1}
            async with http.post(rollout.root + CHAT, json=body, headers=headers) as answer:
                assert answer.status == 200
                raw = (await answer.read()).decode()
            said = f"rollout {index} turn {2 * turn + 1}"
            assert said in raw
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(agent(http, index, rollout) for index, rollout in enumerate(rollouts)))
    for index, rollout in enumerate(rollouts):
        assert [step["completion"][0]["content"] for step in rollout.steps] == [
            f"rollout {index} turn {turn}" for turn in (1, 3, 5)
        ]


async def test_the_runs_sampling_wins_over_the_agents_and_the_smaller_limit_holds(proxied, scripted):
    model = scripted("yes")
    own = {"temperature": 0.7, "max_tokens": 20}
    asked = {**BODY, "temperature": 0.0, "top_p": 0.1, "stop": ["END"], "max_tokens": 9, "seed": 5}
    for mode, expected in {
        "ignore": {"temperature": 0.7, "max_tokens": 20},
        "limits": {"temperature": 0.7, "max_tokens": 9, "stop": ["END"]},
        "all": {"temperature": 0.7, "max_tokens": 9, "stop": ["END"], "top_p": 0.1, "seed": 5},
    }.items():
        rollout = await proxied.rollout(model, agent_sampling=mode, sampling_args=own)
        assert (await rollout.post(CHAT, asked))[0] == 200
        sent = model.calls[-1]["sampling_args"]
        assert {key: sent[key] for key in sent if key not in ("n", "extra_body")} == expected
        assert model.calls[-1]["state"] is rollout.state
    rollout = await proxied.rollout(model, max_total_completion_tokens=7, sampling_args=own)
    for left in (7, 4, 1):
        assert (await rollout.post(CHAT, BODY))[0] == 200
        assert model.calls[-1]["sampling_args"]["max_tokens"] == left
    assert (await rollout.post(CHAT, BODY))[0] == 403
    assert rollout.state["stop_condition"] == "max_total_completion_tokens_reached"


async def test_tokens_that_nobody_can_count_are_not_guessed(proxied, scripted):
    model = scripted("yes")
    rollout = await proxied.rollout(model)
    status, body = await rollout.post("/v1/messages/count_tokens", MESSAGES)
    assert (status, body["error"]["type"]) == (404, "not_found_error")
    assert model.calls == []


async def test_fields_that_an_endpoint_does_not_know_are_left_out_and_named(proxied, scripted):
    model = scripted("yes")
    rollout = await proxied.rollout(model)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    body = {**BODY, "tools": tools, "tool_choice": "none", "response_format": {"type": "json_object"}}
    await rollout.post(CHAT, body)
    assert not model.calls[0]["tools"]
    assert rollout.state["agent_fields_ignored"] == ["response_format", "tool_choice"]
    model.FORWARDED = frozenset({"tool_choice"})
    await rollout.post(CHAT, {**body, "tool_choice": "required"})
    assert model.calls[1]["sampling_args"]["tool_choice"] == "required"
    assert "response_format" not in model.calls[1]["sampling_args"]
    assert json.dumps(rollout.state["agent_fields_ignored"])


async def test_an_agent_that_hangs_up_on_a_stream_leaves_no_step_behind(openai, proxied, scripted):
    slow = Slow(scripted)
    rollout = await proxied.rollout(slow.model)
    async with rollout.openai(max_retries=0) as client:
        call = asyncio.create_task(client.chat.completions.create(**BODY, stream=True))
        await slow.started(1)
        call.cancel()
        with pytest.raises((asyncio.CancelledError, openai.APIError)):
            await call
    slow.gate.set()
    await until(lambda: not rollout.session.num_requests)
    proxied.proxy.close_session(rollout.session, "over")
    assert rollout.steps == []
