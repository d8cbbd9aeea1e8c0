"""Limits: what a stage may take, what a turn may sample, and what never ends."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import mettle.envs as vf
from mettle.envs.limits import bounded_sampling, call_in_thread, within
from mettle.errors import RolloutTimeout

ROWS = [{"question": "q", "answer": "a"}]


class Talk(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "more"}]


def once(name, arguments="{}"):
    """Call a tool, then answer."""
    call = {"tool_calls": [{"id": "c", "name": name, "arguments": arguments}]}
    return lambda prompt: "done" if prompt[-1]["role"] == "tool" else call


async def run(env, client):
    return await env.run_rollout(env.get_dataset()[0], client, "m")


async def test_a_setup_that_takes_too_long_fails_its_rollout(scripted):
    class Stuck(Talk):
        async def setup_state(self, state):
            await asyncio.sleep(1000)

    state = await run(Stuck(dataset=ROWS, setup_timeout_seconds=0.02), scripted("x"))
    assert isinstance(state["error"], RolloutTimeout)
    assert "setup_state took longer than 0.02 s" in str(state["error"])
    assert (state["reward"], state["trajectory"]) == (None, [])


async def test_a_turn_that_takes_too_long_fails_its_rollout_and_keeps_the_turns_before():
    class Hangs(vf.Client):
        async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
            if len(prompt) > 1:
                await asyncio.sleep(1000)
            message = vf.ResponseMessage(content="a", finish_reason="stop", is_truncated=False)
            return vf.Response(id="", created=0, model=model, usage=None, message=message)

    state = await run(Talk(dataset=ROWS, turn_timeout_seconds=0.02), Hangs())
    assert isinstance(state["error"], RolloutTimeout)
    assert "turn 2 took longer" in str(state["error"])
    assert len(state["trajectory"]) == 1


async def test_scoring_and_cleanup_are_bounded_too(scripted):
    async def never(completion):
        await asyncio.sleep(1000)

    class Clings(Talk):
        @vf.cleanup
        async def let_go(self, state):
            await asyncio.sleep(1000)

    env = Clings(dataset=ROWS, max_turns=1, rubric=vf.Rubric([never]))
    env.set_kwargs(scoring_timeout_seconds=0.02, cleanup_timeout_seconds=0.02)
    state = await run(env, scripted("x"))
    assert "scoring took longer" in str(state["error"])
    assert "let_go took longer" in state["cleanup_error"]


async def test_a_tool_that_never_returns_is_answered_for_and_the_rollout_goes_on(scripted):
    released = threading.Event()

    def blocks():
        """Block."""
        released.wait(1000)

    async def sleeps():
        """Sleep."""
        await asyncio.sleep(1000)

    env = vf.ToolEnv(dataset=ROWS, tools=[blocks, sleeps], tool_timeout_seconds=0.05)
    for name in ("blocks", "sleeps"):
        state = await run(env, scripted(once(name)))
        answer = next(m for m in state["completion"] if m["role"] == "tool")
        assert answer["content"] == f"the tool {name} took longer than 0.05 s"
        assert (state["error"], state["stop_condition"]) == (None, "no_tools_called")
    released.set()


async def test_a_tool_with_a_limit_still_gets_its_arguments_and_raises_its_own_errors(scripted):
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    def stops():
        """Stop."""
        raise StopIteration("no more")

    async def times_out():
        """Its own timeout."""
        raise TimeoutError("mine")

    env = vf.ToolEnv(dataset=ROWS, tools=[add, stops, times_out], tool_timeout_seconds=5)
    said = {}
    for name, arguments in (("add", '{"a": 1, "b": 2}'), ("stops", "{}"), ("times_out", "{}")):
        state = await run(env, scripted(once(name, arguments)))
        said[name] = next(m["content"] for m in state["completion"] if m["role"] == "tool")
    assert said == {"add": "3", "stops": "StopIteration: no more", "times_out": "mine"}


async def test_a_tool_timeout_among_the_stop_errors_ends_the_rollout(scripted):
    async def sleeps():
        """Sleep."""
        await asyncio.sleep(1000)

    env = vf.ToolEnv(dataset=ROWS, tools=[sleeps], tool_timeout_seconds=0.01, stop_errors=[RolloutTimeout])
    state = await run(env, scripted(once("sleeps")))
    assert isinstance(state["error"], vf.ToolCallError)


async def test_a_turn_samples_no_more_than_its_budget(scripted):
    client = scripted("x")
    await run(Talk(dataset=ROWS, max_turns=1, max_turn_completion_tokens=7), client)
    assert client.calls[0]["sampling_args"]["max_tokens"] == 7


@pytest.mark.parametrize(
    ("asked", "bounded"),
    [
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 30}, {"max_tokens": 7}),
        ({"max_completion_tokens": 30}, {"max_completion_tokens": 7}),
        ({"max_tokens": None}, {"max_tokens": 7}),
    ],
)
def test_the_smaller_budget_holds(asked, bounded):
    assert bounded_sampling(asked, 7) == bounded
    assert bounded_sampling(asked, None) is asked


async def test_a_timeout_of_the_stages_own_code_is_not_taken_for_ours():
    with pytest.raises(TimeoutError, match="mine"):
        async with within(5, "stage"):
            raise TimeoutError("mine")


async def test_a_thread_left_behind_does_not_keep_anybody_waiting():
    released = threading.Event()
    with pytest.raises(RolloutTimeout):
        async with within(0.01, "x"):
            await call_in_thread(released.wait)
    left = [thread for thread in threading.enumerate() if thread.name.startswith("tool")]
    assert all(thread.daemon for thread in left)
    released.set()
    for thread in left:
        thread.join(60)


async def test_a_million_broken_characters_go_through_a_whole_evaluation(scripted, tmp_path):
    huge = "<answer>" + "x" * 1_000_000 + "\ud83d</answer>"
    parser = vf.XMLParser(["answer"])
    rubric = vf.Rubric([lambda completion, parser: len(parser.parse_answer(completion))], parser=parser)
    rubric.add_metric(parser.get_format_reward_func())
    env = vf.SingleTurnEnv(dataset=[{"question": "\udfff?", "answer": "a"}], parser=parser, rubric=rubric)
    started = time.process_time()
    results = await env.evaluate(scripted(huge), "m", results_path=tmp_path)
    assert results["outputs"][0]["reward"] == 1_000_001
    assert time.process_time() - started < 5
    assert (tmp_path / "results.jsonl").stat().st_size > 1_000_000
