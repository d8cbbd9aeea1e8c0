"""An agent in a sandbox, the proxy, the embedded engine: each training sample is what was sampled, and all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from policies import picked_logprobs

import mettle.envs as vf
from mettle.clients.renderer import Renderer
from mettle.clients.tokens import TokenClient
from mettle.envs.cli_agent_env import CliAgentEnv
from mettle.envs.rollout_record import record_of_state
from mettle.inference.server import InferenceServer
from mettle.orchestrator.samples import rollout_samples
from mettle.records.tokens import Sample

PRELUDE = """
import json, os, urllib.request
def say(messages, dialect="chat"):
    key = os.environ["OPENAI_API_KEY"]
    path = {"chat": "/chat/completions", "messages": "/messages", "responses": "/responses"}[dialect]
    body = {"model": "m", "input": messages} if dialect == "responses" else {"model": "m", "messages": messages, "max_tokens": 12}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
        {"Authorization": "Bearer " + key, "Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request))
    if dialect == "responses":
        return answer["output"]
    if dialect == "messages":
        return [{"role": "assistant", "content": answer["content"] or ""}]
    message = answer["choices"][0]["message"]
    return [{"role": "assistant", "content": message["content"]}]
def user(text):
    return {"role": "user", "content": text}
"""
CONVERSATION = """
history = [user("hi")]
for turn in range(3):
    history += say(history, {dialect!r}) + [user("and?")]
"""
COMPACTION = """
history = [user("hi")]
history += say(history) + [user("and?")]
history += say(history) + [user("so?")]
compacted = [user("in short: hi")]
compacted += say(compacted) + [user("go on")]
say(compacted)
"""
SUBAGENTS = """
one, two = [user("one")], [user("two")]
for turn in range(2):
    one += say(one) + [user("and?")]
    two += say(two) + [user("and?")]
"""
REWRITTEN = """
history = [user("hi")]
say(history)
history += [{"role": "assistant", "content": "I said something else"}, user("and?")]
say(history)
"""


async def play_plainly(server: InferenceServer, renderer: Renderer, script: str) -> Any:
    """A rollout in which the random model happened to say no mark of a thought; such marks branch with this template."""
    marks = {renderer.encode(mark)[0] for mark in ("<think>", "</think>")}
    for seed in range(30):
        (state,) = await play(server, renderer, script, seed=seed)
        if not any(marks & set(step["tokens"].completion_ids) for step in state["trajectory"]):
            return state
    raise AssertionError("the model says nothing else")


async def play(server: InferenceServer, renderer: Renderer, script: str, group: int = 1, seed: int = 3) -> list[Any]:
    """The states of a group of rollouts in which an agent runs `script`."""
    env = CliAgentEnv(
        "python3 /work/agent.py",
        dataset=[{"question": "q"}],
        rubric=vf.Rubric([lambda: 1.0]),
        files={"/work/agent.py": PRELUDE + script},
        poll_interval=0.2,
        memory_gb=0.25,
        disk_size_gb=0.02,
    )
    client = TokenClient(server.base_url, renderer)
    try:
        states = await env.run_group([env.get_dataset()[0]] * group, client, "policy", {"max_tokens": 12, "seed": seed})
    finally:
        await client.close()
        await env.teardown()
    for state in states:
        assert state["error"] is None, state["agent_stderr"]
    return states


def samples_of(state: Any) -> list[Sample]:
    record = record_of_state(state, "r", temperature=1.0, is_for_training=True)
    record = type(record)(**{**{f: getattr(record, f) for f in record.__dataclass_fields__}, "advantage": 1.0})
    return rollout_samples(record, draw_id=0, seq_len=4096)


def check(state: Any, samples: list[Sample], model: Any) -> None:
    """Each sampled id trains exactly once, in its place, with the logarithm of the probability that it was sampled with."""
    sampled = [i for step in state["trajectory"] for i in step["tokens"].completion_ids]
    trained = [i for sample in samples for i in sample.token_ids[sample.loss_mask].tolist()]
    assert sorted(trained) == sorted(sampled)
    calls = {tuple(step["tokens"].context_ids()) for step in state["trajectory"]}
    for sample in samples:
        ids = sample.token_ids.tolist()
        assert tuple(ids) in calls
        expected = picked_logprobs(model, ids).numpy()
        places = np.flatnonzero(sample.loss_mask)
        assert np.allclose(sample.logprobs[places], expected[places - 1], atol=1e-4)
        assert set(sample.versions[places].tolist()) == {0}


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
async def test_a_conversation_is_one_sample_that_extends_the_sampled_ids(
    server: InferenceServer, renderer: Renderer, model: Any, dialect: str
) -> None:
    state = await play_plainly(server, renderer, CONVERSATION.format(dialect=dialect))
    first, second, third = (step["tokens"] for step in state["trajectory"])
    assert second.prompt_ids[: len(first.context_ids())] == first.context_ids()
    assert third.prompt_ids[: len(second.context_ids())] == second.context_ids()
    samples = samples_of(state)
    assert len(samples) == 1
    check(state, samples, model)


async def test_a_compacted_history_is_another_sample(server: InferenceServer, renderer: Renderer, model: Any) -> None:
    state = await play_plainly(server, renderer, COMPACTION)
    samples = samples_of(state)
    assert [int(sample.loss_mask.sum()) > 0 for sample in samples] == [True, True]
    check(state, samples, model)


async def test_a_rewritten_answer_is_context_and_never_trained(
    server: InferenceServer, renderer: Renderer, model: Any
) -> None:
    state = await play_plainly(server, renderer, REWRITTEN)
    samples = samples_of(state)
    assert len(samples) == 2
    check(state, samples, model)
    said = renderer.encode("I said something else")
    second = samples[1]
    text = second.token_ids.tolist()
    (start,) = [i for i in range(len(text)) if text[i : i + len(said)] == said]
    assert not second.loss_mask[start : start + len(said)].any()


async def test_interleaved_subagents_train_each_token_once(
    server: InferenceServer, renderer: Renderer, model: Any
) -> None:
    state = await play_plainly(server, renderer, SUBAGENTS)
    assert len(state["trajectory"]) == 4
    for early, late in ((0, 2), (1, 3)):
        context = state["trajectory"][early]["tokens"].context_ids()
        assert state["trajectory"][late]["tokens"].prompt_ids[: len(context)] == context
    check(state, samples_of(state), model)


async def test_thoughts_that_the_template_forgets_branch_and_still_train_once(
    server: InferenceServer, renderer: Renderer, model: Any
) -> None:
    thought = renderer.encode("</think>")[0]
    for seed in range(30):
        (state,) = await play(server, renderer, CONVERSATION.format(dialect="chat"), seed=seed)
        samples = samples_of(state)
        check(state, samples, model)
        if any(thought in step["tokens"].completion_ids for step in state["trajectory"][:-1]):
            assert len(samples) > 1
            return
    raise AssertionError("the model never thinks")


async def test_the_tokens_of_a_prompt_are_counted_as_they_will_be_sampled(
    server: InferenceServer, renderer: Renderer, model: Any
) -> None:
    count = """
import json, os, urllib.request
body = {"model": "m", "messages": [user("hi")]}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages/count_tokens",
    json.dumps(body).encode(), {"x-api-key": os.environ["ANTHROPIC_API_KEY"]})
print(json.load(urllib.request.urlopen(request))["input_tokens"])
say([user("hi")], "messages")
"""
    for state in await play(server, renderer, count, group=2):
        (step,) = state["trajectory"]
        assert int(state["agent_stdout"]) == len(step["tokens"].prompt_ids)


async def test_the_agents_of_a_group_sample_apart(server: InferenceServer, renderer: Renderer, model: Any) -> None:
    states = await play(server, renderer, CONVERSATION.format(dialect="chat"), group=3)
    for state in states:
        check(state, samples_of(state), model)
    openings = {tuple(state["trajectory"][0]["tokens"].completion_ids) for state in states}
    assert len(openings) == 3
