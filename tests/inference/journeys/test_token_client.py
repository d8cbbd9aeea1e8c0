"""Mettle's own clients against a running server: turns extend the sampled ids, a group is one request."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from policies import picked_logprobs

from mettle.clients.renderer import Renderer
from mettle.clients.tokens import TokenClient
from mettle.inference.server import InferenceServer

FIRST = [{"role": "user", "content": "hi"}]


async def test_a_second_turn_extends_the_ids_that_were_sampled(
    server: InferenceServer, renderer: Renderer, model: Any
) -> None:
    client = TokenClient(server.base_url, renderer)
    state: dict[str, Any] = {"trajectory": []}
    sampling = {"max_tokens": 12, "seed": 2}
    first = await client.get_response(FIRST, "policy", sampling, state=state)
    tokens = first.message.tokens
    said = {"role": "assistant", "content": first.message.content}
    state["trajectory"].append({"prompt": FIRST, "completion": [said], "tokens": tokens})
    conversation = [*FIRST, said, {"role": "user", "content": "and?"}]
    second = await client.get_response(conversation, "policy", sampling, state=state)
    context = [*tokens.prompt_ids, *tokens.completion_ids]
    assert list(second.message.tokens.prompt_ids[: len(context)]) == context
    for response in (first, second):
        used = response.message.tokens
        whole = [*used.prompt_ids, *used.completion_ids]
        expected = picked_logprobs(model, whole)[len(used.prompt_ids) - 1 :]
        assert torch.allclose(torch.tensor(list(used.completion_logprobs)), expected, atol=1e-4)
        assert set(used.completion_versions) == {0}
    await client.close()


async def test_the_first_turns_of_a_group_are_one_request(server: InferenceServer, renderer: Renderer) -> None:
    client = TokenClient(server.base_url, renderer)
    group = client.for_group(4)
    asked = [member.get_response(FIRST, "policy", {"max_tokens": 6}, state={"trajectory": []}) for member in group]
    answers = await asyncio.gather(*asked)
    assert server.service.engine.status().total_requests == 1
    assert len({tuple(answer.message.tokens.completion_ids) for answer in answers}) == 4
    await client.close()
