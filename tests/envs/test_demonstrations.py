"""Demonstrations: played through the environment, and written for the warm-up."""

from __future__ import annotations

import json

import pytest

import mettle.envs as vf
from mettle.envs.demonstrations import Demonstrator
from mettle.errors import UserError
from mettle.runs.demonstrations import write_demonstrations


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


def single(rows, **options):
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[exact]), **options)


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        ({"question": "q", "answer": "a"}, {}, "a"),
        ({"question": "q", "answer": "a", "demonstration": "shown"}, {}, "shown"),
        ({"question": "q", "answer": "a", "demonstration": [{"role": "assistant", "content": "list"}]}, {}, "list"),
        ({"question": "q", "answer": "a"}, {"demonstrate": lambda messages, row: f"<{row['answer']}>"}, "<a>"),
    ],
)
async def test_the_most_explicit_demonstration_is_played(row, options, said):
    env = single([row], **options)
    state = await env.run_rollout(env.get_dataset()[0], Demonstrator(env), "gold")
    assert state["completion"][-1]["content"] == said
    assert state["reward"] == float(said == "a")


class Countdown(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        if len(state["trajectory"]) == 3:
            state["final_env_response"] = [vf.UserMessage(content="done")]
        return [vf.UserMessage(content=f"turn {len(state['trajectory'])}")]


def echo(messages, row):
    return f"after {messages[-1]['content']}"


def written(path, env):
    write_demonstrations(path, env, env_id="x")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_demonstrated_turn_of_a_game_is_a_chat_that_ends_with_it(tmp_path):
    env = Countdown(dataset=[{"question": "start"}], rubric=vf.Rubric(), demonstrate=echo)
    chats = written(tmp_path / "d.jsonl", env)
    assert [chat["messages"][-1]["content"] for chat in chats] == ["after start", "after turn 1", "after turn 2"]
    assert [len(chat["messages"]) for chat in chats] == [2, 4, 6]


def test_a_chain_of_tool_calls_is_one_chat_with_its_tools(tmp_path):
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    def demonstrate(messages, row):
        if messages[-1]["role"] == "user":
            return vf.AssistantMessage(tool_calls=[vf.ToolCall(id="1", name="add", arguments='{"a": 1, "b": 2}')])
        return messages[-1]["content"]

    env = vf.ToolEnv(
        dataset=[{"question": "1+2"}], tools=[add], rubric=vf.Rubric(funcs=[lambda state: 1.0]), demonstrate=demonstrate
    )
    [chat] = written(tmp_path / "d.jsonl", env)
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert chat["messages"][-1]["content"] == "3"
    assert chat["tools"][0]["name"] == "add"


def test_an_environment_that_shows_nothing_or_fails_is_named(tmp_path):
    with pytest.raises(UserError, match="'x' has no demonstrations"):
        written(tmp_path / "d.jsonl", single([{"question": "q"}]))
    with pytest.raises(UserError, match=r"'x' fails under its own demonstration.*1 turns, no more"):
        written(tmp_path / "d.jsonl", Countdown(dataset=[{"question": "q", "answer": "a"}], rubric=vf.Rubric()))
