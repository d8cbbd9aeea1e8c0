"""What environments written for verifiers v0 rely on, one fact a check, each under the sentence that it holds to."""

from __future__ import annotations

import asyncio
import json
import signal
import threading

import pytest

import mettle.envs as vf
from mettle.envs.rollout_record import output_of

ROWS = [{"question": "q", "answer": "a"}]
FACTS = {}


def fact(sentence):
    """Register a check under the fact that it holds to."""

    def keep(check):
        assert sentence not in FACTS, sentence
        FACTS[sentence] = check
        return check

    return keep


class Echo(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "more"}]


def echo(**fields):
    return Echo(**{"dataset": ROWS, "max_turns": 2, **fields})


async def roll(env, client, **row):
    return await env.rollout({**env.get_dataset()[0], **row}, client, "m", {"temperature": 0.5})


# Construction


@fact("an environment without any dataset is a ValueError")
def _(_):
    with pytest.raises(ValueError, match="dataset"):
        vf.SingleTurnEnv()


@fact("keyword arguments that nobody knows become attributes")
def _(_):
    assert echo(colour="red").colour == "red"


@fact("a parser that is not the rubric's is warned of, and the environment keeps its own")
def _(_):
    parser = vf.ThinkParser()
    assert echo(parser=parser, rubric=vf.Rubric()).parser is parser


@fact("without a parser the environment takes the rubric's")
def _(_):
    parser = vf.XMLParser(["answer"])
    assert echo(rubric=vf.Rubric(parser=parser)).parser is parser


@fact("constructing an environment installs no signal handler and works in any thread")
def _(_):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    made = []
    thread = threading.Thread(target=lambda: made.append(vf.ToolEnv(dataset=ROWS, tools=[])))
    thread.start()
    thread.join()
    echo()
    assert len(made) == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@fact("oai_tools given to the constructor are the tools, flat")
def _(_):
    tool = {"type": "function", "function": {"name": "t", "description": "d", "parameters": {}}}
    assert [t.name for t in echo(oai_tools=[tool]).tool_defs] == ["t"]


@fact("sampling arguments of the call replace those of the constructor, key by key, over n=1 and an empty extra_body")
async def _(scripted):
    client = scripted("x")
    env = echo(max_turns=1, sampling_args={"temperature": 0.1, "extra_body": {"top_k": 1}})
    await env.rollout(env.get_dataset()[0], client, "m", {"extra_body": {"min_p": 0.1}})
    assert client.calls[0]["sampling_args"] == {"n": 1, "temperature": 0.1, "extra_body": {"min_p": 0.1}}


# Data


@fact("a question becomes system prompt, few-shot and one user message")
def _(_):
    env = echo(system_prompt="s", few_shot=[{"role": "user", "content": "f"}])
    assert [m.content for m in env.get_dataset()[0]["prompt"]] == ["s", "f", "q"]


@fact("a prompt of its own gets the system prompt unless it has one, and no few-shot")
def _(_):
    own = [{"prompt": [{"role": "user", "content": "q"}]}, {"prompt": [{"role": "system", "content": "o"}]}]
    env = echo(dataset=own, system_prompt="s", few_shot=[{"role": "user", "content": "f"}])
    assert [[m.content for m in row["prompt"]] for row in env.get_dataset()] == [["s", "q"], ["o"]]


@fact("a missing example_id is the row's number, one that is no number moves to src_id")
def _(_):
    rows = echo(dataset=[*ROWS, {"question": "q", "example_id": "x"}]).get_dataset()
    assert ([row["example_id"] for row in rows], rows[1]["src_id"]) == ([0, 1], "x")


@fact("the evaluation set falls back to the training set, the training set to nothing")
def _(_):
    assert len(echo().get_eval_dataset()) == 1
    with pytest.raises(ValueError, match="no training dataset"):
        vf.SingleTurnEnv(eval_dataset=ROWS).get_dataset()


@fact("a dataset builder runs when the rows are first asked for")
def _(_):
    built = []
    env = echo(dataset=lambda: built.append(1) or ROWS)
    assert not built
    env.build_dataset()
    assert (len(env.get_dataset()), built) == (1, [1])


# The state


@fact("a fresh state has the keys of v0")
async def _(scripted):
    state = await echo().init_state(echo().get_dataset()[0], scripted("x"), "m")
    expected = {
        *("input", "task", "client", "model", "sampling_args", "is_completed", "is_truncated", "tool_defs"),
        *("trajectory", "completion", "trajectory_id", "reward", "metrics", "error", "final_env_response", "timing"),
        *("usage", "usage_tracker"),
    }
    assert expected <= set(state)
    assert (state["trajectory"], state["completion"], state["reward"], state["error"]) == ([], None, None, None)
    assert len(state["trajectory_id"]) == 32


@fact("prompt, answer, info and example_id are the input's, read and written")
async def _(scripted):
    state = await echo().init_state({"question": "q", "prompt": [], "answer": "a", "example_id": 7}, None, "m")
    state["answer"] = "b"
    assert (state["input"]["answer"], state.get("example_id"), "answer" in state, state.get("nope", 1)) == (
        *("b", 7, True),
        1,
    )


@fact("info that is JSON text is read")
async def _(scripted):
    state = await echo().init_state({"prompt": [], "info": '{"x": [1]}'}, None, "m")
    assert state["info"] == {"x": [1]}


@fact("a text prompt becomes one text message")
async def _(scripted):
    state = await echo().init_state({"prompt": "once", "example_id": 0}, None, "m")
    assert state["prompt"] == [{"role": "text", "content": "once"}]


@fact("tools of a row's info come before the environment's")
async def _(scripted):
    info = {"tool_defs": [{"name": "z", "description": "d", "parameters": {}}]}
    state = await echo().init_state({"prompt": [], "info": info}, None, "m")
    assert [tool["name"] for tool in state["tool_defs"]] == ["z"]


@fact("usage is one live, read-only mapping, and its tracker counts for judges too")
async def _(scripted):
    env = echo()
    state = await env.init_state(env.get_dataset()[0], None, "m")
    usage = state["usage"]
    assert (env.get_state_usage(state), dict(usage)) == (None, {"input_tokens": 0.0, "output_tokens": 0.0})
    env.increment_state_usage(state, 5, 7)
    state["usage_tracker"].increment_from_response(vf.Response(usage=vf.Usage(prompt_tokens=1, completion_tokens=2)))
    assert dict(usage) == {"input_tokens": 6.0, "output_tokens": 9.0} == env.get_state_usage(state)
    with pytest.raises(TypeError):
        usage["input_tokens"] = 0


@fact("timing reads in nested seconds and in flat milliseconds, and the old spelling may be written")
async def _(scripted):
    timing = (await roll(echo(), scripted("x")))["timing"]
    assert timing["generation_ms"] == timing["generation"]["duration"] * 1000 == timing.generation.duration * 1000
    assert (len(timing["model"]["spans"]), len(timing["env"]["spans"]), timing.get("no", 1)) == (2, 1, 1)
    timing["scoring_ms"] = 250.0
    assert timing.scoring.duration == pytest.approx(0.25)
    assert "total" in timing
    assert timing["total_ms"] == timing.total * 1000


@fact("state.stop ends the rollout before the next model call, as state_done unless named")
async def _(scripted):
    class Stops(Echo):
        async def setup_state(self, state):
            state.stop()

    client = scripted("x")
    state = await roll(Stops(dataset=ROWS), client)
    assert (client.calls, state["stop_condition"]) == ([], "state_done")


@fact("step rewards add up")
async def _(scripted):
    state = await roll(echo(), scripted("x"))
    state.add_step_reward(1)
    state.add_step_reward(0.5)
    assert (state["trajectory"][0]["reward"], state.total_step_reward()) == (None, 1.5)


# The loop


@fact("setup_state may return another state, whose keys count")
async def _(scripted):
    class Other(Echo):
        async def setup_state(self, state):
            return vf.State({**state, "mine": 1})

    assert (await roll(Other(dataset=ROWS, max_turns=1), scripted("x")))["mine"] == 1


@fact("the second prompt is the first, the model's message and the environment's answer")
async def _(scripted):
    state = await roll(echo(), scripted("x"))
    assert [m["content"] for m in state["trajectory"][1]["prompt"]] == ["q", "x", "more"]
    assert [m["content"] for m in state["completion"]] == ["x", "more", "x"]


@fact("a trajectory step has the keys of v0")
async def _(scripted):
    (step,) = (await roll(echo(max_turns=1), scripted("x")))["trajectory"]
    assert set(step) == {
        *("prompt", "completion", "response", "tokens", "reward", "advantage", "is_truncated", "trajectory_id"),
        "extras",
    }
    assert (step["extras"], step["reward"], step["completion"][0].role) == ({}, None, "assistant")


@fact("an environment may answer with text")
async def _(scripted):
    class Says(Echo):
        async def env_response(self, messages, state, **kwargs):
            return "hello"

    state = await roll(Says(dataset=ROWS, max_turns=2), scripted("x"))
    assert state["completion"][1] == {"role": "text", "content": "hello"}


@pytest.mark.parametrize("word", ["bye", [{"role": "user", "content": "bye"}], vf.UserMessage(content="bye")])
async def test_the_last_word_may_be_text_a_list_or_one_message(scripted, word):
    class Last(Echo):
        async def env_response(self, messages, state, **kwargs):
            state["final_env_response"] = word
            return word

    state = await roll(Last(dataset=ROWS), scripted("x"))
    assert [m["content"] for m in state["completion"]] == ["x", "bye"]
    assert state["stop_condition"] == "has_final_env_response"


@fact("stop conditions are asked before the first model call too, errors first, then by name")
async def _(scripted):
    class Never(Echo):
        @vf.stop
        async def a_first(self, state, **kwargs):
            assert set(kwargs) == {"env"}
            return True

    client = scripted("x")
    state = await roll(Never(dataset=ROWS), client)
    assert (state["stop_condition"], client.calls, state["completion"]) == ("a_first", [], [])


@fact("max_turns counts model calls and -1 is no limit")
async def _(scripted):
    said = iter("abcde")

    class Until(Echo):
        @vf.stop
        async def said_d(self, state):
            return bool(state["trajectory"]) and state["completion_text"] == "d"

        async def add_trajectory_step(self, state, trajectory_step):
            state["completion_text"] = trajectory_step["completion"][0]["content"]
            await super().add_trajectory_step(state, trajectory_step)

    state = await roll(Until(dataset=ROWS), scripted(lambda _: next(said)))
    assert (len(state["trajectory"]), state["stop_condition"]) == (4, "said_d")


@fact("a total of completion tokens ends the rollout")
async def _(scripted):
    env = echo(max_turns=9)
    env.set_max_total_completion_tokens(6)
    state = await roll(env, scripted("x"))
    assert (state["stop_condition"], len(state["trajectory"])) == ("max_total_completion_tokens_reached", 2)


@fact("a prompt that does not fit ends the rollout truncated, without an error")
async def _(scripted):
    class Long(Echo):
        async def get_prompt_messages(self, state):
            raise vf.OverlongPromptError("x")

    state = await roll(Long(dataset=ROWS), scripted("x"))
    assert (state["stop_condition"], state["is_truncated"], state["error"]) == ("prompt_too_long", True, None)


@fact("running out of time keeps the turns and is neither an error nor truncation")
async def _(scripted):
    class Slow(Echo):
        async def env_response(self, messages, state, **kwargs):
            await asyncio.sleep(60)

    state = await roll(Slow(dataset=ROWS, timeout_seconds=0.05), scripted("x"))
    assert (state["stop_condition"], state["timed_out"], state["is_truncated"]) == ("timeout_reached", True, False)
    assert ([m["content"] for m in state["completion"]], state["error"]) == (["x"], None)


@fact("cleanup handlers get state, task, env and resources by name, after the completion is there")
async def _(scripted):
    seen = {}

    class Tidy(Echo):
        @vf.cleanup
        async def tidy(self, state, task, env, resources):
            seen.update(completion=state["completion"], env=env, resources=resources)

    env = Tidy(dataset=ROWS, max_turns=1)
    await roll(env, scripted("x"))
    assert (len(seen["completion"]), seen["env"] is env, seen["resources"]) == (1, True, None)


@fact("teardown handlers run once, when the environment is closed")
async def _(_):
    closed = []

    class Closes(Echo):
        @vf.teardown
        async def close(self):
            closed.append(1)

    await Closes(dataset=ROWS).teardown()
    assert closed == [1]


@fact("every multi-turn rollout has the metric num_turns")
async def _(scripted):
    env = echo(rubric=vf.Rubric([lambda completion: 1.0]))
    state = await env.run_rollout(env.get_dataset()[0], scripted("x"), "m")
    assert (state["metrics"]["num_turns"], state["reward"]) == (2.0, 1.0)


@fact("an image in a prompt reaches the model as it is")
async def _(scripted):
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    client = scripted("x")
    await roll(echo(dataset=[{"prompt": [{"role": "user", "content": content}]}], max_turns=1), client)
    assert client.calls[0]["prompt"][0].content == content


# Settings


@fact("set_kwargs uses a setter where there is one")
def _(_):
    env = echo()
    env.set_kwargs(max_seq_len=5, foo=3, score_rollouts=False, max_total_completion_tokens=9)
    assert (env.max_seq_len, env.foo, env.score_rollouts, env.max_total_completion_tokens) == (5, 3, False, 9)


@fact("set_concurrency lets as many blocking calls run side by side")
async def _(_):
    env = echo()
    env.set_concurrency(24)
    barrier = threading.Barrier(24, timeout=10)
    await asyncio.gather(*(asyncio.to_thread(barrier.wait) for _ in range(24)))
    assert env.concurrency == 24


@fact("score_rollouts=False gives reward 0 and no metrics")
async def _(scripted):
    env = echo(score_rollouts=False)
    state = await env.run_rollout(env.get_dataset()[0], scripted("x"), "m")
    assert (state["reward"], state["metrics"]) == (0.0, {})


@fact("requires_group_rollouts follows the rubric, provides_advantages is False")
def _(_):
    assert not echo().requires_group_rollouts
    assert echo(rubric=vf.Rubric([lambda completions: [1.0] * len(completions)])).requires_group_rollouts
    assert echo().provides_advantages is False


@fact("add_rubric keeps the rubric that is there")
async def _(scripted):
    def one(completion):
        return 1.0

    env = echo(rubric=vf.Rubric([one]))
    env.add_rubric(vf.Rubric([one]))
    state = await env.run_rollout(env.get_dataset()[0], scripted("x"), "m")
    assert (state["reward"], state["metrics"]["one"]) == (2.0, 2.0)


@fact("evaluate_sync works without a loop and inside a running one")
async def _(scripted):
    env = vf.SingleTurnEnv(dataset=ROWS)
    inside = env.evaluate_sync(scripted("x"), "m")
    outside = await asyncio.to_thread(env.evaluate_sync, scripted("x"), "m")
    assert [len(found["outputs"]) for found in (inside, outside)] == [1, 1]
    assert len(vf.Environment.make_dataset(inside)) == 1


# Groups of environments


@fact("rows of a group are routed to their own environment, nested groups too")
async def _(scripted):
    def scored(value):
        return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([lambda completion: value]))

    inner = vf.EnvGroup([scored(0.25), scored(0.5)], env_names=["a", "b"])
    group = vf.EnvGroup([inner, scored(1.0)], env_names=["inner", "c"])
    results = await group.evaluate(scripted("x"), "m")
    found = {json.dumps(o["info"]["env_id"]): o["reward"] for o in results["outputs"]}
    assert found == {'["inner", "a"]': 0.25, '["inner", "b"]': 0.5, '"c"': 1.0}
    assert [o["example_id"] for o in sorted(results["outputs"], key=lambda o: o["example_id"])] == [0, 1, 2]


@fact("a row routed nowhere is an error and no reward")
async def _(scripted):
    group = vf.EnvGroup([vf.SingleTurnEnv(dataset=ROWS)], env_names=["a"])
    state = await group.run_rollout({**group.get_dataset()[0], "info": {"env_id": "zz"}}, scripted("x"), "m")
    assert (state["reward"], "zz" in str(state["error"])) == (None, True)


@fact("settings of a group reach its environments")
def _(_):
    envs = [echo(), echo()]
    group = vf.EnvGroup(envs, env_names=["a", "b"])
    group.set_kwargs(max_seq_len=4, score_rollouts=False, max_total_completion_tokens=3, concurrency=2)
    assert {(e.max_seq_len, e.score_rollouts, e.max_total_completion_tokens, e.concurrency) for e in envs} == {
        (4, False, 3, 2)
    }
    assert group.get_env_for_name("a") is envs[0]
    with pytest.raises(ValueError, match="zz"):
        group.get_env_for_name("zz")


# What is saved


@fact("a saved row names every metric again and has the timing of v0")
async def _(scripted):
    env = echo(max_turns=1, rubric=vf.Rubric([lambda completion: 1.0]))
    row = output_of(await env.run_rollout(env.get_dataset()[0], scripted("x"), "m"))
    assert row["num_turns"] == row["metrics"]["num_turns"] == 1.0
    assert {"start_time", "setup", "generation", "scoring", "model", "env", "total", "overhead"} <= set(row["timing"])


@pytest.mark.parametrize("sentence", FACTS)
async def test_it_is_a_fact_that(scripted, sentence):
    found = FACTS[sentence](scripted)
    if found is not None:
        await found
