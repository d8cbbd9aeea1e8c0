"""Token in, token out: extension of what was sampled, branching, and one request for a group."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.clients.errors import InvalidModelResponseError, ModelError
from mettle.clients.group import group_members
from mettle.clients.tokens import TokenClient, generate_fields
from mettle.clients.tool_parser import parse_turn
from mettle.clients.transport import ModelTransport, RetryPolicy
from mettle.records.messages import ResponseTokens, UserMessage


@pytest.fixture
async def client(endpoint, renderer, generate_answer, no_wait):
    endpoint.answers = [generate_answer]
    transport = ModelTransport(endpoint.url, retry=RetryPolicy(max_retries=0), sleep=no_wait)
    made = TokenClient(endpoint.url, renderer, transport=transport)
    yield made
    await made.close()


def turn(prompt, response):
    completion = [response.message.to_assistant()]
    return {"prompt": prompt, "completion": completion, "tokens": response.message.tokens}


async def test_a_later_turn_extends_the_sampled_ids(endpoint, client):
    state = {"trajectory": []}
    prompt = [UserMessage(content="a")]
    first = await client.get_response(prompt, "m", {"max_tokens": 4, "n": 1}, state=state)
    assert endpoint.requests[0] == {"prompt_ids": [259, 97, 300, 260], "n": 1, "model": "m", "max_tokens": 4}
    assert first.message.content == "c0"
    assert first.message.tokens.completion_versions == [3, 3, 3]
    state["trajectory"].append(turn(prompt, first))
    later = [*prompt, *state["trajectory"][0]["completion"], UserMessage(content="b")]
    await client.get_response(later, "m", {}, state=state)
    assert endpoint.requests[1]["prompt_ids"] == [259, 97, 300, 260, 99, 48, 300, 259, 98, 300, 260]


async def test_a_rewritten_history_is_rendered_whole(endpoint, client, rewriting_renderer):
    client.renderer = rewriting_renderer
    state = {"trajectory": []}
    prompt = [UserMessage(content="a")]
    state["trajectory"].append(turn(prompt, await client.get_response(prompt, "m", {}, state=state)))
    edited = [UserMessage(content="A"), UserMessage(content="b")]
    second = await client.get_response(edited, "m", {}, state=state)
    tokens = second.message.tokens
    tokens.follow(state["trajectory"][0]["tokens"])
    assert endpoint.requests[1]["prompt_ids"] == [259, 65, 300, 259, 98, 300, 260] == tokens.prompt_ids
    assert tokens.prefix_length == 1


async def test_what_the_engine_says_of_a_replica_stays_with_the_tokens(endpoint, client, generate_answer):
    def answer(request):
        told = generate_answer(request)
        return told | {"choices": [choice | {"replica": "10.0.0.7:8000"} for choice in told["choices"]]}

    endpoint.answers = [answer]
    state = {"trajectory": []}
    response = await client.get_response([UserMessage(content="a")], "m", {}, state=state)
    tokens = response.message.tokens
    assert (tokens.replica, tokens["replica"]) == ("10.0.0.7:8000",) * 2
    assert ResponseTokens.from_parts(**tokens.parts()).replica == tokens.replica


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"token_ids": [1], "logprobs": [], "versions": [1], "finish_reason": "stop"}, "1 ids, 0 logprobs"),
        ({"token_ids": [1]}, "cannot be read"),
        ({"token_ids": ["x"], "logprobs": [0.0], "versions": [1], "finish_reason": "stop"}, "cannot be read"),
        ({"token_ids": [1], "logprobs": [0.0], "versions": [1], "finish_reason": "abort"}, "aborted"),
    ],
)
async def test_a_broken_choice_is_an_error(endpoint, client, choice, says):
    endpoint.answers = [{"choices": [choice]}]
    with pytest.raises(ModelError, match=says):
        await client.get_response([UserMessage(content="a")], "m", {})


async def test_a_wrong_number_of_choices_is_an_error(endpoint, client):
    endpoint.answers = [{"choices": []}]
    with pytest.raises(InvalidModelResponseError, match="asked for 1 choices"):
        await client.get_response([UserMessage(content="a")], "m", {})


async def ask(group, index, content="a", **sampling):
    state = {"trajectory": [], "trajectory_id": str(index)}
    return await group[index].get_response([UserMessage(content=content)], "m", sampling, state=state)


async def test_a_groups_first_turns_go_out_as_one_request(endpoint, client):
    group = client.for_group(4)
    responses = await asyncio.gather(*(ask(group, i, seed=5) for i in range(4)))
    assert [request["n"] for request in endpoint.requests] == [4]
    assert "seed" not in endpoint.requests[0]
    assert len(set(endpoint.requests[0]["seeds"])) == 4
    assert [response.message.content for response in responses] == ["c0", "c1", "c2", "c3"]


async def test_members_that_begin_alike_share_one_rendering(client, monkeypatch):
    rendered = []
    render = client.renderer.render
    monkeypatch.setattr(
        client.renderer, "render", lambda *args, **kwargs: rendered.append(1) or render(*args, **kwargs)
    )
    group = client.for_group(4)
    await asyncio.gather(*(ask(group, i) for i in range(4)))
    assert len(rendered) == 1


async def test_members_that_differ_or_never_ask_hold_up_nobody(endpoint, client):
    group = group_members(client, 4, wait_s=60.0)
    asks = [asyncio.create_task(ask(group, i, content)) for i, content in enumerate(["a", "a", "b"])]
    await asyncio.sleep(0)
    group[3].leave()
    await asyncio.wait_for(asyncio.gather(*asks), 5)
    assert sorted(request["n"] for request in endpoint.requests) == [1, 2]


async def test_a_late_member_gets_a_request_and_a_stream_of_its_own(endpoint, client):
    group = client.for_group(3)
    await asyncio.gather(ask(group, 0, seed=5), ask(group, 1, seed=5))
    await ask(group, 2, seed=5)
    assert [request["n"] for request in endpoint.requests] == [2, 1]
    assert endpoint.requests[1]["seeds"][0] not in endpoint.requests[0]["seeds"]


async def test_seeds_depend_on_the_member_and_its_turn_and_not_on_who_asks_first(endpoint, client):
    def seeds():
        return [seed for request in endpoint.requests for seed in request.get("seeds", [request.get("seed")])]

    group = client.for_group(3)
    await asyncio.gather(*(ask(group, i, seed=5) for i in range(3)))
    await ask(group, 1, seed=5)
    together = seeds()
    endpoint.requests.clear()
    group = client.for_group(3)
    for index in (2, 1, 0, 1):
        await ask(group, index, seed=5)
    alone = seeds()
    assert together == [alone[2], alone[1], alone[0], alone[3]]
    assert len(set(together)) == 4


async def test_a_failed_request_fails_each_member_by_itself(endpoint, client):
    endpoint.answers = [(500, "down")]
    group = client.for_group(3)
    errors = await asyncio.gather(*(ask(group, i) for i in range(3)), return_exceptions=True)
    assert all(isinstance(error, ModelError) and "status 500: down" in str(error) for error in errors)
    assert len({id(error) for error in errors}) == 3


async def test_a_cancelled_member_does_not_cancel_its_siblings(endpoint, client):
    group = group_members(client, 3, wait_s=60.0)
    first = asyncio.create_task(ask(group, 0))
    await asyncio.sleep(0)
    first.cancel()
    others = await asyncio.wait_for(asyncio.gather(ask(group, 1), ask(group, 2)), 60)
    assert [response.message.content for response in others] == ["c0", "c1"]
    assert first.cancelled()


def test_an_unknown_sampling_argument_is_refused_and_harmless_ones_are_dropped():
    known = generate_fields(
        {"n": 1, "logprobs": True, "max_completion_tokens": 3, "stop": "x", "extra_body": {"top_k": 4}}
    )
    assert known == {"max_tokens": 3, "stop": ["x"], "top_k": 4}
    with pytest.raises(ModelError, match="length_penalty"):
        generate_fields({"length_penalty": 1.1})


ids = st.lists(st.integers(0, 3), max_size=12)


@given(st.lists(st.tuples(ids, ids, st.integers(0, 12)), min_size=1, max_size=6))
def test_tokens_read_back_what_was_put_in_however_turns_share_prefixes(turns):
    """Each turn keeps some prefix of the one before; only the rest is stored, and all of it reads back."""
    previous: ResponseTokens | None = None
    whole: list[int] = []
    made = []
    for new, completion, keep in turns:
        prompt = whole[:keep] + new
        tokens = ResponseTokens(prompt, completion, [0.0] * len(completion))
        if previous is not None:
            tokens.follow(previous)
            assert tokens.prefix_length >= min(keep, len(whole))
        whole, previous = prompt + completion, tokens
        made.append((tokens, prompt, completion))
    for tokens, prompt, completion in made:
        assert tokens["prompt_ids"] == prompt
        assert tokens["completion_ids"] == completion
        assert len(tokens["prompt_mask"]) == len(prompt)
        assert tokens.context_ids() == prompt + completion


def test_a_cut_keeps_within_the_limit():
    tokens = ResponseTokens([1, 2], [3, 4, 5], [-1.0, -2.0, -3.0], [1, 1, 1])
    tokens.cut(4)
    assert (tokens.completion_ids, tokens.completion_logprobs) == ([3, 4], [-1.0, -2.0])
    assert tokens["is_truncated"]
    assert not tokens["overlong_prompt"]
    tokens = ResponseTokens([1, 2, 3], [4], [-1.0])
    tokens.cut(2)
    assert tokens["overlong_prompt"]
    assert tokens.completion_ids == []


async def test_a_turn_with_other_tools_is_rendered_anew_because_the_model_must_see_them(endpoint, client):
    old, new = [{"name": "old"}], [{"name": "new"}]
    prompt = [UserMessage(content="a")]
    said = {"role": "assistant", "content": "c"}
    for tools, is_extended in ((old, True), (new, False)):
        tokens = ResponseTokens([259, 299], [ord("c"), 300], [-0.5] * 2)
        step = {"prompt": prompt, "completion": [said], "tokens": tokens, "extras": {"tool_defs": old}}
        await client.get_response([*prompt, said, *prompt], "m", {}, tools, state={"trajectory": [step]})
        assert (endpoint.requests[-1]["prompt_ids"][:2] == [259, 299]) is is_extended


async def test_a_call_that_was_sampled_is_a_tool_call_of_the_message(client, monkeypatch):
    said = 'so: <tool_call>{"name": "ask", "arguments": {"who": "bo"}}</tool_call>'
    monkeypatch.setattr(client.renderer, "parse", lambda ids, tools: parse_turn(said, has_tools=bool(tools)))
    tools = [{"name": "ask"}]
    response = await client.get_response([UserMessage(content="a")], "m", {}, tools, state={"trajectory": []})
    [call] = response.message.tool_calls
    assert (call["name"], call["arguments"], response.message.content) == ("ask", '{"who": "bo"}', "so: ")
    assert call["id"]
    assert response.message.to_assistant()["tool_calls"] == [call]
    silent = await client.get_response([UserMessage(content="a")], "m", {}, None, state={"trajectory": []})
    assert (silent.message.tool_calls, silent.message.content) == (None, said)
