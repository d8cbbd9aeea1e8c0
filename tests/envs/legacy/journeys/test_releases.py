"""Small environments written as authors wrote them for each release of verifiers, unchanged."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

import mettle.envs as vf
from mettle.records.messages import ToolCall


async def run(env: Any, client: Any, **options: Any) -> dict[str, Any]:
    """One rollout of the first row."""
    results = await env.evaluate(client=client, model="m", num_examples=1, **options)
    return results["outputs"][0]


class QuestionsOf013(vf.MultiTurnEnv):
    """0.1.2 to 0.1.7: messages and state go in and out, a plain function may do, `turn` and `responses` are kept."""

    def is_completed(self, messages, state, **kwargs):
        return state["turn"] >= len(state["info"]["questions"])

    def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": state["info"]["questions"][state["turn"]]}], state


async def test_a_plain_is_completed_and_a_tuple_from_env_response_make_as_many_turns_as_there_are_questions(scripted):
    seen = {}

    def three_answers(completion, state, task, info, **kwargs):
        seen.update(task=task, turn=state["turn"], responses=len(state["responses"]), timing=state["timing"])
        said = [message["content"] for message in completion if message["role"] == "assistant"]
        return float(len(said) == len(info["questions"]))

    row = {
        "prompt": [{"role": "user", "content": "one?"}],
        "task": "questions",
        "info": {"questions": ["one?", "two?", "three?"]},
    }
    env = QuestionsOf013(dataset=[row], rubric=vf.Rubric(funcs=[three_answers]))
    output = await run(env, scripted("yes"))
    assert output["reward"] == 1.0
    assert [message["content"] for message in output["completion"]] == ["yes", "two?", "yes", "three?", "yes"]
    assert seen["task"] == "questions"
    assert (seen["turn"], seen["responses"]) == (3, 3)
    assert seen["timing"]["generation_ms"] == pytest.approx(seen["timing"]["generation"]["duration"] * 1000)


class GameOf015(vf.MultiTurnEnv):
    """The game may end in `env_response`; the model is not asked again, and what was said last is kept."""

    async def setup_state(self, state, **kwargs):
        state["is_won"] = False
        return state

    async def is_completed(self, messages, state, **kwargs):
        limit = await super().is_completed(messages, state, **kwargs)
        return limit or state["is_won"]

    async def env_response(self, messages, state, **kwargs):
        state["is_won"] = True
        return {"role": "user", "content": "you won"}, state


async def test_a_game_that_ends_in_env_response_makes_no_further_model_call(scripted):
    client = scripted("move")
    output = await run(GameOf015(dataset=[{"question": "go"}], max_turns=5), client)
    assert len(client.calls) == 1
    assert [message["content"] for message in output["completion"]] == ["move", "you won"]


async def test_the_standard_limits_hold_for_an_older_is_completed(scripted):
    class Endless(QuestionsOf013):
        def is_completed(self, messages, state, **kwargs):
            return False

        def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "more"}], state

    client = scripted("move")
    await run(Endless(dataset=[{"question": "go"}], max_turns=3), client)
    assert len(client.calls) == 3


class CallerOf015(vf.MultiTurnEnv):
    """A simulated user by the environment's own model call, with client, model and prompt by name."""

    def __init__(self, user_client: Any, **kwargs: Any) -> None:
        super().__init__(max_turns=2, **kwargs)
        self.user_client = user_client

    async def env_response(self, messages, state, **kwargs):
        response = await self.get_model_response(
            client=self.user_client,
            model="user",
            prompt=[{"role": "user", "content": messages[-1]["content"]}],
            sampling_args={"temperature": 0.3},
            message_type="chat",
        )
        return [{"role": "user", "content": response.choices[0].message.content}], state


async def test_an_environment_may_call_another_model_as_it_did_before_states(scripted):
    user = scripted("the user says")
    output = await run(CallerOf015(user, dataset=[{"question": "go"}]), scripted("the model says"))
    assert [message["content"] for message in output["completion"]] == [
        "the model says",
        "the user says",
        "the model says",
    ]
    assert user.calls[0]["sampling_args"]["temperature"] == 0.3


class LoopOf015(vf.MultiTurnEnv):
    """A rollout of its own, which takes the parts and gives `(completion, state)`."""

    async def env_response(self, messages, state, **kwargs):
        raise AssertionError("this environment has its own loop")

    async def rollout(self, client, model, prompt, answer="", task="default", info=None, sampling_args=None, **kwargs):
        state = {"responses": [], "turn": 0, "mine": answer + task}
        completion = []
        for _ in range(2):
            response = await self.get_model_response(client, model, [*prompt, *completion], sampling_args=sampling_args)
            state["responses"].append(response)
            state["turn"] += 1
            completion.append({"role": "assistant", "content": response.choices[0].message.content})
            completion.append({"role": "user", "content": "again"})
        return completion, state


async def test_a_rollout_of_parts_becomes_a_state_with_its_trajectory(scripted):
    seen = {}

    def keep(state):
        seen.update(state=state)
        return 1.0

    env = LoopOf015(dataset=[{"question": "go", "answer": "a", "task": "t"}], rubric=vf.Rubric(funcs=[keep]))
    output = await run(env, scripted("hm"))
    state = seen["state"]
    assert output["reward"] == 1.0
    assert state["mine"] == "at"
    assert [len(step["prompt"]) for step in state["trajectory"]] == [1, 3]
    assert state["is_completed"]
    assert output["token_usage"]["output_tokens"] == 6


async def test_super_rollout_may_be_called_with_parts(scripted):
    class Logged(vf.SingleTurnEnv):
        async def rollout(self, client, model, prompt, answer="", task="default", info=None, sampling_args=None):
            completion, state = await super().rollout(client, model, prompt, answer, task, info, sampling_args)
            state["logged"] = completion[-1]["content"]
            return completion, state

    def logged(state):
        return float(state["logged"] == "said")

    env = Logged(dataset=[{"question": "go"}], rubric=vf.Rubric(funcs=[logged]))
    assert (await run(env, scripted("said")))["reward"] == 1.0


class RubricOf015(vf.Rubric):
    """Scoring overridden with the parts of a rollout."""

    async def score_rollout(self, prompt, completion, answer, state, task="default", info=None, **kwargs):
        score = await super().score_rollout(prompt, completion, answer, state, task, info)
        score.metrics["length"] = float(len(completion))
        return vf.RolloutScore(reward=score.reward + 1.0, metrics=score.metrics)


async def test_a_rubric_that_scores_parts_gives_reward_and_metrics(scripted):
    rubric = RubricOf015(funcs=[lambda completion, **kwargs: 0.5], parallelize_scoring=False)
    output = await run(vf.SingleTurnEnv(dataset=[{"question": "go"}], rubric=rubric), scripted("said"))
    assert output["reward"] == 1.5
    assert output["metrics"]["length"] == 1.0


async def test_a_rubric_that_scores_a_group_of_parts_compares_its_rollouts(scripted):
    class Ranking(vf.Rubric):
        async def score_rollouts(self, prompts, completions, answers, states, tasks, infos, **kwargs):
            lengths = [len(completion[-1]["content"]) for completion in completions]
            ranks = [float(sorted(lengths).index(length)) for length in lengths]
            return vf.RolloutScores(reward=ranks, metrics={"rank": ranks})

    words = iter(["a", "abc", "ab"])
    env = vf.SingleTurnEnv(dataset=[{"question": "go"}], rubric=Ranking())
    assert env.requires_group_rollouts
    results = await env.evaluate(client=scripted(lambda _: next(words)), model="m", rollouts_per_example=3)
    assert sorted(output["reward"] for output in results["outputs"]) == [0.0, 1.0, 2.0]
    assert all(output["metrics"]["rank"] == output["reward"] for output in results["outputs"])


async def test_a_rubric_of_018_scores_with_a_semaphore(scripted):
    class Guarded(vf.Rubric):
        async def score_rollout(self, state, score_sem):
            async with score_sem:
                state["reward"], state["metrics"] = 0.25, {"guarded": 1.0}

    env = vf.SingleTurnEnv(dataset=[{"question": "go"}], rubric=Guarded())
    results = await env.evaluate(client=scripted("x"), model="m", independent_scoring=True)
    assert results["outputs"][0]["reward"] == 0.25


def called(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"id": "c0", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"content": None, "tool_calls": [ToolCall(id="c0", name=name, arguments=json.dumps(arguments))], "raw": call}


def calling(name: str, **arguments: Any) -> Any:
    """A model that calls a tool once and then is done."""
    return lambda prompt: called(name, **arguments) if prompt[-1]["role"] == "user" else "done"


async def test_tools_of_013_are_given_per_row_and_hidden_arguments_come_without_the_tools_name(scripted):
    class Shop(vf.StatefulToolEnv):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.add_tool(self.buy, args_to_skip=["account"])

        def buy(self, item: str, account: dict) -> str:
            """Buy something."""
            account["items"].append(item)
            return f"bought {item}"

        def update_tool_args(self, tool_args, messages, state, **kwargs):
            state.setdefault("account", {"items": []})
            return {**tool_args, "account": state["account"]}

    def bought(state, completion):
        return float(state["account"]["items"] == ["tea"] and completion[1]["content"] == "bought tea")

    env = Shop(dataset=[{"question": "buy tea"}], rubric=vf.Rubric(funcs=[bought]))
    assert list(env.oai_tools[0]["function"]["parameters"]["properties"]) == ["item"]
    assert (await run(env, scripted(calling("buy", item="tea"))))["reward"] == 1.0


async def test_a_tool_call_reads_flat_nested_and_as_an_object(scripted):
    readings = []

    class Reader(vf.ToolEnv):
        async def env_response(self, messages, state, **kwargs):
            for call in messages[-1]["tool_calls"]:
                readings.append(call["name"])
                readings.append(call.function.name)
                readings.append(call["function"]["name"])
                readings.append(call.get("function", {}).get("name", ""))
                readings.append(json.loads(call.function.arguments)["x"])
                assert "function" in call
                assert call.type == "function"
            return await super().env_response(messages, state, **kwargs)

    def add_one(x: int) -> int:
        """Add one."""
        return x + 1

    env = Reader(dataset=[{"question": "go"}], tools=[add_one])
    output = await run(env, scripted(calling("add_one", x=1)))
    assert readings == ["add_one", "add_one", "add_one", "add_one", 1]
    assert output["completion"][1]["content"] == "2"


async def test_oai_tools_come_as_an_argument_as_an_attribute_and_in_a_rows_info(scripted):
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
    given = vf.SingleTurnEnv(dataset=[{"question": "go"}], oai_tools=[tool])
    assert given.tool_defs[0].name == "look"
    assert given.oai_tools == [tool]
    assigned = vf.SingleTurnEnv(dataset=[{"question": "go"}])
    assigned.oai_tools = [tool]
    for env in (given, assigned, vf.SingleTurnEnv(dataset=[{"question": "go", "info": {"oai_tools": [tool]}}])):
        client = scripted("x")
        await run(env, client)
        assert client.calls[0]["tools"][0]["name"] == "look"


async def test_a_state_may_be_given_its_tools_in_setup(scripted):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

    class Late(vf.SingleTurnEnv):
        async def setup_state(self, state, **kwargs):
            state["oai_tools"] = [tool]
            assert "oai_tools" in state
            assert state["oai_tools"][0]["function"]["name"] == "look"
            return state

    client = scripted("x")
    await run(Late(dataset=[{"question": "go"}]), client)
    assert client.calls[0]["tools"][0]["name"] == "look"


async def test_rewards_get_the_rows_other_columns_by_name(scripted):
    def in_band(completion, difficulty, source="?", **kwargs):
        return float(difficulty == 3 and source == "book")

    row = {"question": "go", "answer": "", "difficulty": 3, "source": "book"}
    env = vf.SingleTurnEnv(dataset=[row], rubric=vf.Rubric(funcs=[in_band]))
    assert (await run(env, scripted("x")))["reward"] == 1.0


async def test_get_prompt_messages_of_019_may_give_plain_dicts(scripted):
    class Fresh(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return []

        async def get_prompt_messages(self, state):
            return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]

    client = scripted("x")
    await run(Fresh(dataset=[{"question": "go"}], max_turns=2), client)
    assert [call["prompt"][0].content for call in client.calls] == ["turn 0", "turn 1"]


async def test_messages_of_other_libraries_are_messages(scripted):
    class Told(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            assert messages[-1].content == messages[-1]["content"] == messages[-1].get("content")
            assert isinstance(messages[-1], dict)
            assert messages[-1].model_dump()["role"] == "assistant"
            return [SimpleNamespace(model_dump=lambda **_: {"role": "user", "content": "from elsewhere"})]

    output = await run(Told(dataset=[{"question": "go"}], max_turns=2), scripted("x"))
    assert output["completion"][1] == {"role": "user", "content": "from elsewhere"}


async def test_a_response_reads_as_a_chat_completion(scripted):
    def finish(state):
        choice = state["responses"][-1].choices[0]
        return float(choice.finish_reason == "stop" and choice.message.content == "x" and choice.text == "x")

    env = vf.SingleTurnEnv(dataset=[{"question": "go"}], rubric=vf.Rubric(funcs=[finish]))
    assert (await run(env, scripted("x")))["reward"] == 1.0


async def test_older_helpers_of_environments_and_rubrics_are_there(scripted):
    def right(completion, answer, parser, **kwargs):
        return float(parser.parse_answer(completion) == answer)

    rubric = vf.Rubric(funcs=[right], weights=[0.5], judge_name="kept")
    env = vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=rubric, system_prompt="s", custom=3)
    assert (rubric.judge_name, env.custom) == ("kept", 3)
    assert env.get_reward_funcs()[0] is right
    assert env.get_reward_weights()[0] == 0.5
    assert [message["role"] for message in env.format_prompt("q", "s")] == ["system", "user"]
    assert env.format_dataset([{"q": "a?"}], question_key="q")[0]["prompt"][0]["content"] == "a?"
    said = [{"role": "assistant", "content": "4"}]
    assert await rubric.call_reward_func(right, [], said, "4", {}) == 1.0
    rubric.reward_funcs = [right, right]
    rubric.reward_weights = [1.0, 2.0]
    assert rubric.get_reward_weights() == [1.0, 2.0]


def test_a_group_finds_an_environment_by_its_name():
    first, second = (vf.SingleTurnEnv(dataset=[{"question": "q"}]) for _ in range(2))
    group = vf.EnvGroup([first, second], env_names=["a", "b"])
    assert group.get_env_for_task("b") is second
