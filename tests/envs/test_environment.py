"""Rollouts: what a state holds, when it stops, and whose error an error is."""

from __future__ import annotations

import asyncio

import pytest

import mettle.envs as vf
from mettle.errors import EnvironmentFault, UserError

ROWS = [{"question": "q", "answer": "a"}]


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


class Echo(vf.MultiTurnEnv):
    """Repeats what the model said."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"you said {messages[-1]['content']}"}]


def echo(**fields):
    return Echo(**{"dataset": ROWS, "rubric": vf.Rubric([exact]), "max_turns": 3, **fields})


async def run(env, client, row=None):
    return await env.run_rollout(row or env.get_dataset()[0], client, "m", {"temperature": 0.5})


async def test_a_single_turn_rollout_holds_what_v0_promises(scripted):
    env = vf.SingleTurnEnv(
        dataset=ROWS, system_prompt="s", few_shot=[{"role": "user", "content": "f"}], rubric=vf.Rubric([exact])
    )
    client = scripted("a")
    state = await run(env, client)
    assert [message["content"] for message in state["prompt"]] == ["s", "f", "q"]
    assert state["completion"] == [{"role": "assistant", "content": "a"}]
    assert (state["reward"], state["metrics"], state["stop_condition"]) == (
        1.0,
        {"exact": 1.0, "num_turns": 1.0},
        "max_turns_reached",
    )
    assert (state["answer"], state["info"], state["example_id"], state["error"]) == ("a", {}, 0, None)
    assert client.calls[0]["sampling_args"] == {"n": 1, "extra_body": {}, "temperature": 0.5}
    assert state["usage"] == {"input_tokens": 10, "output_tokens": 3}
    assert state["timing"].generation.duration >= 0
    assert state["timing"]["generation_ms"] == state["timing"]["generation"]["duration"] * 1000
    assert (state["turn"], len(state["responses"])) == (1, 1)


async def test_a_conversation_goes_on_until_its_turns_are_used_up(scripted):
    state = await run(echo(), scripted("x"))
    roles = [message["role"] for message in state["completion"]]
    assert roles == ["assistant", "user", "assistant", "user", "assistant"]
    assert [len(step["prompt"]) for step in state["trajectory"]] == [1, 3, 5]
    assert state["trajectory"][1]["prompt"][2]["content"] == "you said x"
    assert len(state["timing"].env.spans) == 2


async def test_stop_conditions_go_by_priority_then_name(scripted):
    class Stops(Echo):
        @vf.stop
        def zebra(self, state):
            return len(state["trajectory"]) >= 1

        @vf.stop
        async def aardvark(self, state, env):
            return env is self and len(state["trajectory"]) >= 1

        @vf.stop(priority=5)
        def urgent(self):
            return False

    env = Stops(dataset=ROWS, max_turns=1)
    assert (await run(env, scripted("x")))["stop_condition"] == "aardvark"


async def test_the_environments_last_word_ends_the_rollout_without_a_model_call(scripted):
    class LastWord(Echo):
        async def env_response(self, messages, state, **kwargs):
            state["final_env_response"] = [vf.UserMessage(content="bye")]
            return state["final_env_response"]

    client = scripted("x")
    state = await run(LastWord(dataset=ROWS), client)
    assert len(client.calls) == 1
    assert [message["content"] for message in state["completion"]] == ["x", "bye"]
    assert state["stop_condition"] == "has_final_env_response"


async def test_a_cut_answer_marks_the_rollout_truncated(scripted):
    state = await run(vf.SingleTurnEnv(dataset=ROWS), scripted(lambda _: {"content": "x", "is_truncated": True}))
    assert state["is_truncated"]
    assert state["trajectory"][0]["is_truncated"]


async def test_sampled_ids_are_cut_at_the_limit_and_stored_as_what_each_turn_added(scripted, tokens):
    made = iter([tokens([1, 2], [3, 4], [-1.0, -2.0]), tokens([1, 2, 3, 4, 5], [6, 7], [-1.0, -1.0])])
    env = echo(max_turns=2, max_seq_len=6)
    state = await run(env, scripted(lambda _: {"content": "x", "tokens": next(made)}))
    first, second = (step["tokens"] for step in state["trajectory"])
    assert second["prompt_ids"] == [1, 2, 3, 4, 5]
    assert list(second.new_prompt_ids) == [5]
    assert second.previous is first
    assert second["completion_ids"] == [6]
    assert state["is_truncated"]


async def test_the_row_is_never_changed_by_a_rollout(scripted):
    class Vandal(Echo):
        async def setup_state(self, state):
            state["info"]["list"].append(1)
            state["prompt"][0]["content"] = "changed"
            state["answer"] = "changed"

    rows = [{"prompt": [{"role": "user", "content": "q"}], "answer": "a", "info": {"list": []}, "task": "t"}]
    env = Vandal(dataset=rows, max_turns=1)
    state = await run(env, scripted("x"))
    assert (state["answer"], state["input"]["answer"], state["task"]) == ("changed", "changed", "t")
    assert rows[0]["info"] == {"list": []}
    assert env.get_dataset()[0]["prompt"] == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("where", ["setup_state", "env_response", "stop", "get_prompt_messages", "add_trajectory_step"])
async def test_whatever_an_environment_raises_is_that_rollouts_error(scripted, where):
    cleaned = []

    class Broken(Echo):
        @vf.cleanup
        async def tidy(self, state):
            cleaned.append(state["trajectory_id"])

    async def fail(*args, **kwargs):
        raise ValueError("boom")

    fail.__name__ = where
    setattr(Broken, where, vf.stop(fail) if where == "stop" else fail)
    state = await run(Broken(dataset=ROWS, max_turns=3), scripted("x"))
    assert isinstance(state["error"], EnvironmentFault)
    assert "ValueError: boom" in str(state["error"])
    assert isinstance(state["error"], vf.Error)
    assert (state["reward"], state["stop_condition"]) == (None, "has_error")
    assert state["is_completed"]
    assert len(cleaned) == 1


async def test_an_overridden_rollout_that_raises_gives_an_errored_state(scripted):
    class Own(vf.Environment):
        async def rollout(self, input, client, model, sampling_args=None):
            raise KeyError("x")

    state = await run(Own(dataset=ROWS), scripted("x"))
    assert isinstance(state["error"], EnvironmentFault)
    assert state["reward"] is None


async def test_a_model_that_fails_and_one_that_does_not_fit_are_told_apart(scripted):
    state = await run(echo(), scripted(lambda _: RuntimeError("down")))
    assert isinstance(state["error"], vf.ModelError)
    assert isinstance(state["error"].__cause__, RuntimeError)
    state = await run(echo(), scripted(lambda prompt: vf.OverlongPromptError("too long") if len(prompt) > 1 else "a"))
    assert state["error"] is None
    assert (state["stop_condition"], state["is_truncated"]) == ("prompt_too_long", True)
    assert state["reward"] == 1.0


async def test_a_cleanup_that_raises_is_recorded_and_the_reward_stays(scripted):
    class Messy(Echo):
        @vf.cleanup
        async def a_breaks(self, state):
            raise OSError("gone")

        @vf.cleanup
        async def b_runs(self, state):
            state["b"] = True

    state = await run(
        Messy(dataset=[{"question": "q", "answer": "x"}], rubric=vf.Rubric([exact]), max_turns=1), scripted("x")
    )
    assert (state["reward"], state["b"]) == (1.0, True)
    assert "OSError: gone" in state["cleanup_error"]


async def test_a_rollout_that_runs_out_of_time_keeps_its_turns_and_is_scored():
    class Slow(vf.Client):
        num_calls = 0

        async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
            Slow.num_calls += 1
            if Slow.num_calls > 1:
                await asyncio.sleep(60)
            message = vf.ResponseMessage(content="a", finish_reason="stop", is_truncated=False)
            return vf.Response(id="", created=0, model=model, usage=None, message=message)

    state = await run(echo(timeout_seconds=0.05), Slow())
    assert (state["timed_out"], state["stop_condition"], state["error"]) == (True, "timeout_reached", None)
    assert len(state["trajectory"]) == 1
    assert state["reward"] == 1.0


async def test_a_group_shares_its_client_and_one_failure_is_its_own(scripted):
    calls = iter(range(100))
    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([exact]))
    client = scripted(lambda _: ValueError("x") if next(calls) == 2 else "a")
    states = await env.run_group([env.get_dataset()[0]] * 4, client, "m")
    assert [state["reward"] for state in states] == [1.0, 1.0, None, 1.0]
    assert [state["advantage"] for state in states] == [0.0, 0.0, None, 0.0]
    assert len({state["trajectory_id"] for state in states}) == 4


async def test_members_of_a_group_ask_through_its_group_client_and_say_when_they_leave(scripted):
    class Grouped(scripted):
        def for_group(self, size):
            self.members = [Member("a") for _ in range(size)]
            return self.members

    class Member(scripted):
        num_left = 0

        def leave(self):
            self.num_left += 1

    client = Grouped("a")
    env = vf.SingleTurnEnv(dataset=ROWS)
    states = await env.run_group([env.get_dataset()[0]] * 3, client, "m")
    assert [(len(member.calls), member.num_left) for member in client.members] == [(1, 1)] * 3
    assert all(state["client"] is client for state in states)


async def test_infrastructure_is_tried_again_and_environments_are_not(scripted, monkeypatch):
    async def no_sleep(_):
        return None

    monkeypatch.setattr("mettle.envs.environment.asyncio.sleep", no_sleep)
    outcomes = iter([vf.SandboxError("x"), vf.InvalidModelResponseError("y"), "a"])
    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([exact]))
    state = await env.run_rollout(env.get_dataset()[0], scripted(lambda _: next(outcomes)), "m", max_retries=3)
    assert (state["error"], state["reward"]) == (None, 1.0)
    client = scripted(lambda _: vf.ToolError("mine"))
    state = await env.run_rollout(env.get_dataset()[0], client, "m", max_retries=3)
    assert (len(client.calls), str(state["error"])) == (1, "mine")


def test_datasets_may_be_lists_builders_or_anything_indexable():
    built = []

    def build():
        built.append(1)
        return [{"question": str(i), "answer": ""} for i in range(10)]

    env = vf.SingleTurnEnv(dataset=build, system_prompt="s")
    assert not built
    assert env.get_dataset(n=3)["example_id"] == [0, 1, 2]
    shuffled = env.get_dataset(seed=1)
    assert shuffled["example_id"] != list(range(10))
    assert sorted(shuffled["example_id"]) == list(range(10))
    assert shuffled["example_id"] == env.get_dataset(seed=1)["example_id"]
    assert len(built) == 1

    class Columns:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return {"question": f"q{index}", "example_id": f"row-{index}"}

    rows = vf.SingleTurnEnv(dataset=Columns()).get_dataset()
    assert (rows[1]["example_id"], rows[1]["src_id"]) == (1, "row-1")


def test_prompts_get_their_system_message_once():
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]
    env = vf.SingleTurnEnv(dataset=[{"prompt": own}, {"prompt": own[1:]}], system_prompt="s")
    prompts = [[message["content"] for message in row["prompt"]] for row in env.get_dataset()]
    assert prompts == [["own", "q"], ["s", "q"]]


def test_mistakes_in_the_constructor_are_said():
    with pytest.raises(ValueError, match="needs a dataset"):
        vf.SingleTurnEnv()
    with pytest.raises(UserError, match=r"neither `prompt` nor `question`; it has \['example_id', 'text'\]"):
        vf.SingleTurnEnv(dataset=[{"text": "x"}])
    assert vf.SingleTurnEnv(dataset=ROWS, colour="red").colour == "red"
    with pytest.raises(UserError, match="BrowserEnv of verifiers is not offered here: use MCPEnv"):
        vf.BrowserEnv()


def test_evaluation_falls_back_to_the_training_rows(caplog):
    env = vf.SingleTurnEnv(dataset=ROWS)
    assert len(env.get_eval_dataset()) == 1
    assert "stands in" in caplog.text


async def test_old_habits_still_work(scripted):
    class Old(vf.MultiTurnEnv):
        async def is_completed(self, messages, state, **kwargs):
            return messages[-1]["content"] == "done"

        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "more"}], state

    said = iter(["a", "done"])
    state = await run(Old(dataset=ROWS), scripted(lambda _: next(said)))
    assert [message["content"] for message in state["completion"]] == ["a", "more", "done"]
    assert state["is_completed"]
