"""Whole evaluations against an endpoint that misbehaves: every rollout ends, and each failure is its own."""

from __future__ import annotations

from itertools import cycle, pairwise

import mettle.envs as vf
from mettle.clients.tokens import TokenClient

GOOD = {"id": "x", "model": "m", "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}
FAULTS = [
    (401, "bad key"),
    (429, "slow down"),
    (500, "oops"),
    (200, "<html>"),
    (200, '{"choices": []}'),
    "half",
    "hang up",
    (400, '{"error": {"message": "maximum context length"}}'),
]


def says_yes(completion):
    return float(bool(completion) and completion[-1]["content"] == "yes")


async def test_one_good_answer_among_every_kind_of_fault_is_the_whole_average(endpoint):
    faults = cycle([GOOD, *FAULTS])
    endpoint.answers = [lambda _: next(faults)]
    rows = [{"question": f"q{i}"} for i in range(18)]
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([says_yes]))
    client = vf.OpenAIChatCompletionsClient(vf.ClientConfig(endpoint.url, max_retries=0))
    client.endpoint.transport.retry = type(client.endpoint.transport.retry)(max_retries=0, max_garbage_retries=0)
    results = await env.evaluate(client, "m", max_concurrent=1)
    await client.close()
    outputs = results.outputs
    assert len(outputs) == 18
    assert sum(output["reward"] == 1.0 for output in outputs) == 2
    assert sum(output["reward"] is None for output in outputs) == 14
    assert all((output["error"] is None) == (output["reward"] is not None) for output in outputs)
    assert {output["error"]["kind"] for output in outputs if output["error"]} == {"provider"}
    too_long = [output for output in outputs if output["stop_condition"] == "prompt_too_long"]
    assert [output["reward"] for output in too_long] == [0.0, 0.0]
    assert results.metadata["avg_reward"] == 0.5


async def test_a_faulty_token_endpoint_fails_groups_and_not_the_evaluation(endpoint, renderer, generate_answer):
    answers = cycle([generate_answer, (500, "oops"), {"choices": []}, (200, "[")])

    def answer(request):
        made = next(answers)
        return made(request) if callable(made) else made

    endpoint.answers = [answer]
    env = vf.SingleTurnEnv(eval_dataset=[{"question": f"q{i}"} for i in range(8)], rubric=vf.Rubric([says_yes]))
    client = TokenClient(endpoint.url, renderer)
    client.transport.retry = type(client.transport.retry)(max_retries=0, max_garbage_retries=0)
    results = await env.evaluate(client, "m", rollouts_per_example=3, max_concurrent=1)
    await client.close()
    assert [request["n"] for request in endpoint.requests] == [3] * 8
    assert sum(output["error"] is None for output in results.outputs) == 6
    assert sum(output["reward"] is None for output in results.outputs) == 18


async def test_a_conversation_over_the_token_endpoint_is_one_unbroken_sequence(endpoint, renderer, generate_answer):
    class Talk(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [vf.UserMessage(content="go on")]

    endpoint.answers = [generate_answer]
    env = Talk(dataset=[{"question": "q"}], rubric=vf.Rubric([says_yes]), max_turns=4)
    client = TokenClient(endpoint.url, renderer)
    states = await env.run_group([env.get_dataset()[0]] * 3, client, "m", {"max_tokens": 8})
    await client.close()
    assert [request["n"] for request in endpoint.requests] == [3, *[1] * 9]
    for state in states:
        tokens = [step["tokens"] for step in state["trajectory"]]
        for before, after in pairwise(tokens):
            assert after.prefix_length == len(before.context_ids())
            assert after["prompt_ids"][: after.prefix_length] == before.context_ids()
        assert sum(len(turn.new_prompt_ids) + len(turn.completion_ids) for turn in tokens) == len(
            tokens[-1].context_ids()
        )
        assert set(tokens[0].completion_versions) == {3}
