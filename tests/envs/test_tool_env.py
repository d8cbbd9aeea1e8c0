"""Tools: how they are described, called, and refused."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

import mettle.envs as vf
from mettle.envs.tool_schema import docstring_parts
from mettle.errors import EnvironmentFault

ROWS = [{"question": "q", "answer": "5"}]


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first,
            which may be long.
        b (int): The second.

    Returns:
        The sum.
    """
    return a + b


async def fail(text: str):
    """Fail."""
    raise ValueError(f"no {text}")


def calls(*pairs):
    return {"tool_calls": [{"id": f"c{i}", "name": n, "arguments": a} for i, (n, a) in enumerate(pairs)]}


async def converse(env, scripted, *said):
    turns = iter(said)
    client = scripted(lambda _: next(turns))
    state = await env.run_rollout(env.get_dataset()[0], client, "m")
    return state, client


def test_a_function_becomes_a_strict_schema():
    env = vf.ToolEnv(dataset=ROWS, tools=[add])
    assert env.tool_defs == [
        {
            "name": "add",
            "description": "Add two numbers.",
            "strict": True,
            "parameters": {
                "title": "add_args",
                "type": "object",
                "properties": {
                    "a": {"title": "A", "type": "integer", "description": "The first,\nwhich may be long."},
                    "b": {"title": "B", "type": "integer", "description": "The second.", "default": 2},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        }
    ]
    assert env.oai_tools[0]["function"]["name"] == "add"


def test_open_dicts_and_choices_are_described_too():
    def tool(options: dict[str, Any], mode: Literal["x", "y"], note: str | None = None):
        """:param options: Any options.
        :param mode: How.
        """

    described = vf.convert_func_to_tool_def(tool)
    properties = described.parameters["properties"]
    assert described.strict is False
    assert properties["mode"]["enum"] == ["x", "y"]
    assert properties["options"]["description"] == "Any options."
    assert "default" not in properties["note"]
    assert docstring_parts("Just this.") == ("Just this.", {})


async def test_calls_are_answered_until_none_is_made(scripted):
    env = vf.ToolEnv(
        dataset=ROWS,
        tools=[add, fail],
        rubric=vf.Rubric([lambda completion, answer: float(completion[-1]["content"] == answer)]),
    )
    state, client = await converse(env, scripted, calls(("add", '{"a": 3}'), ("add", '{"a": 1, "b": 1}')), "5")
    assert [(m["content"], m["tool_call_id"]) for m in state["completion"] if m["role"] == "tool"] == [
        ("5", "c0"),
        ("2", "c1"),
    ]
    assert (state["reward"], state["stop_condition"]) == (1.0, "no_tools_called")
    assert state["metrics"]["total_tool_calls"] == state["metrics"]["add_calls"] == 2.0
    assert state["metrics"]["fail_calls"] == 0.0
    assert [tool["name"] for tool in client.calls[0]["tools"]] == ["add", "fail"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("sub", "{}"), "no tool 'sub'"),
        (("add", "{"), "Expecting property name"),
        (("add", "[1]"), "JSON list, not an object"),
        (("add", '{"c": 1}'), "unexpected keyword argument 'c'"),
        (("fail", '{"text": "luck"}'), "no luck"),
    ],
)
async def test_what_a_call_gets_wrong_is_told_to_the_model(scripted, call, says):
    env = vf.ToolEnv(dataset=ROWS, tools=[add, fail], error_formatter=lambda error: f"Error: {error}")
    state, _ = await converse(env, scripted, calls(call), "ok")
    told = state["completion"][1]["content"]
    assert told.startswith("Error: ")
    assert says in told
    assert state["error"] is None


async def test_errors_named_as_fatal_end_the_rollout(scripted):
    env = vf.ToolEnv(dataset=ROWS, tools=[fail], stop_errors=[ValueError])
    state, _ = await converse(env, scripted, calls(("fail", '{"text": "x"}')))
    assert isinstance(state["error"], vf.ToolCallError)
    state, _ = await converse(env, scripted, calls(("fail", "{")))
    assert isinstance(state["error"], vf.ToolParseError)
    assert state["reward"] is None


async def test_content_parts_pass_and_other_results_become_text(scripted):
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]

    def look() -> list[Any]:
        """Look."""
        return parts

    def count() -> list[int]:
        """Count."""
        return [1, 2]

    env = vf.ToolEnv(dataset=ROWS, tools=[look, count])
    state, _ = await converse(env, scripted, calls(("look", ""), ("count", "{}")), "ok")
    assert [message["content"] for message in state["completion"][1:3]] == [parts, "[1, 2]"]


async def test_hidden_arguments_are_filled_from_the_state(scripted):
    class Bank(vf.StatefulToolEnv):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.add_tool(self.pay, args_to_skip=["account"])

        async def pay(self, amount: int, account: str) -> str:
            """Pay."""
            return f"{account} pays {amount}"

        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            return {**tool_args, "account": state["answer"]}

    env = Bank(dataset=ROWS)
    assert list(env.tool_defs[0]["parameters"]["properties"]) == ["amount"]
    state, _ = await converse(env, scripted, calls(("pay", '{"amount": 3}')), "ok")
    assert state["completion"][1]["content"] == "5 pays 3"


class Safe(vf.StatefulToolEnv):
    """Its hidden argument cannot always be filled."""

    def __init__(self, failure, **kwargs):
        super().__init__(**kwargs)
        self.failure = failure
        self.add_tool(self.open, args_to_skip=["key"])

    def open(self, drawer: int, key: str) -> str:
        """Open a drawer."""
        return f"drawer {drawer} opens with {key}"

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        if self.failure is not None:
            raise self.failure
        return {"key": "the state's", **tool_args}


@pytest.mark.parametrize(
    ("failure", "kind", "says"),
    [
        (KeyError("vault"), EnvironmentFault, "update_tool_args of open: KeyError: 'vault'"),
        (vf.SandboxError("it is gone"), vf.SandboxError, "it is gone"),
    ],
)
async def test_hidden_arguments_that_cannot_be_filled_are_the_rollouts_error_and_no_tools_word(
    scripted, failure, kind, says
):
    env = Safe(failure, dataset=ROWS, rubric=vf.Rubric([lambda: 1.0]))
    state, _ = await converse(env, scripted, calls(("open", '{"drawer": 1}')), "ok")
    assert type(state["error"]) is kind
    assert says in str(state["error"])
    assert state["reward"] is None
    assert [message["role"] for message in state["completion"]] == ["assistant"]


async def test_a_tool_that_the_model_made_up_is_told_to_it_whatever_its_arguments_would_need(scripted):
    env = Safe(KeyError("vault"), dataset=ROWS)
    state, _ = await converse(env, scripted, calls(("burn", "{}")), "ok")
    assert state["error"] is None
    assert "no tool 'burn'" in state["completion"][1]["content"]


async def test_a_model_cannot_choose_what_is_hidden_from_it(scripted):
    env = Safe(None, dataset=ROWS)
    assert env.skipped_args == {"open": ["key"]}
    state, _ = await converse(env, scripted, calls(("open", '{"drawer": 1, "key": "mine"}')), "ok")
    assert state["completion"][1]["content"] == "drawer 1 opens with the state's"
    env.remove_tool(env.open)
    assert (env.skipped_args, env.tool_defs) == ({}, [])


def test_tools_come_and_go():
    env = vf.ToolEnv(dataset=ROWS, tools=[add])
    with pytest.raises(ValueError, match="'add' already"):
        env.add_tool(add)
    env.remove_tool(add)
    assert (env.tool_defs, env.tool_map) == ([], {})
    assert "add_calls" not in env.rubric.get_reward_func_names()


async def test_saved_tool_calls_are_json_text(scripted):
    env = vf.ToolEnv(dataset=ROWS, tools=[add])
    turns = iter([calls(("add", '{"a": 3}')), "5"])
    results = await env.evaluate(scripted(lambda _: next(turns)), "m")
    saved = results.outputs[0]["completion"][0]["tool_calls"][0]
    assert json.loads(saved) == {"id": "c0", "name": "add", "arguments": '{"a": 3}'}
