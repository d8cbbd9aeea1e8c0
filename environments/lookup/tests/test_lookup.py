"""Questions answered by scripts, and by what is demonstrated."""

from __future__ import annotations

import json

import pytest

import mettle.envs as vf
from mettle.envs.demonstrations import Demonstrator


class Script(vf.Client):
    """Makes one call for each name in `asked`, then says `said`."""

    def __init__(self, asked, said) -> None:
        self.asked, self.said = asked, said

    async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
        turn = sum(message["role"] == "tool" for message in prompt)
        calls = None
        if turn < len(self.asked):
            calls = [vf.ToolCall(id=f"c{turn}", name="ask", arguments=json.dumps(self.asked[turn]))]
        message = vf.ResponseMessage(
            content=None if calls else self.said,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return vf.Response(id="", created=0, model=model, usage=None, message=message)


async def test_a_table_leads_from_the_name_to_the_answer_in_as_many_calls_as_the_question_says():
    env = vf.load_environment("lookup", max_hops=4)
    for row in env.get_eval_dataset():
        name = row["info"]["who"]
        for _ in range(row["question"].count("friend")):
            name = row["info"]["friends"][name]
        assert name == row["answer"] != row["info"]["who"]


async def test_demonstrations_of_any_number_of_calls_are_right_when_the_number_is():
    env = vf.load_environment("lookup", shown="any", num_eval=40)
    outputs = (await env.evaluate(Demonstrator(env), "shown")).outputs
    enough = [output["total_tool_calls"] == output["info"]["hops"] for output in outputs]
    earned = [output["reward"] and not output["is_unearned"] for output in outputs]
    assert [bool(each) for each in earned] == enough
    assert 0.15 < sum(enough) / 40 < 0.6
    # A third calls nobody, and guesses one name in twenty-four.
    unaided = [output for output in outputs if output["is_unaided"]]
    assert {output["total_tool_calls"] for output in unaided} == {0.0}
    assert 0.1 < len(unaided) / 40 < 0.6
    assert sum(output["reward"] for output in unaided) == sum(output["is_unearned"] for output in unaided) <= 4


async def test_a_name_that_nobody_has_is_told_and_an_answer_with_more_than_the_name_is_wrong():
    env = vf.load_environment("lookup", max_hops=1)
    row = env.get_eval_dataset()[0]
    right = row["answer"]
    lost = await env.run_rollout(row, Script([{"who": "zed"}], right), "script")
    assert (lost["completion"][1]["content"], lost["reward"]) == ("nobody is called zed", 1.0)
    talked = await env.run_rollout(row, Script([{"who": row["info"]["who"]}], f"it is {right}"), "script")
    assert talked["reward"] == 0.0


async def test_the_model_neither_sees_nor_sets_the_table():
    env = vf.load_environment("lookup", max_hops=1)
    [tool] = env.tool_defs
    assert list(tool["parameters"]["properties"]) == ["who"]
    row = env.get_eval_dataset()[0]
    asked = {"who": row["info"]["who"], "friends": {row["info"]["who"]: "mine"}}
    done = await env.run_rollout(row, Script([asked], "mine"), "script")
    assert (done["completion"][1]["content"], done["reward"]) == (row["answer"], 0.0)


async def test_a_brief_listing_says_less_of_the_same_tool_and_long_names_are_answered_as_well():
    env = vf.load_environment("lookup", listing="brief", num_syllables=3, num_eval=20)
    [brief], [full] = env.tool_defs, vf.load_environment("lookup").tool_defs
    assert brief["name"] == full["name"]
    assert list(brief["parameters"]["properties"]) == list(full["parameters"]["properties"])
    assert len(json.dumps(brief)) < len(json.dumps(full)) / 2
    outputs = (await env.evaluate(Demonstrator(env), "shown")).outputs
    assert {(output["reward"], len(output["answer"])) for output in outputs} == {(1.0, 6)}
    names = {name for output in outputs for name in output["info"]["friends"]}
    assert len(names) > 400  # a table each, of 24 in thousands
    assert all(len(output["info"]["friends"]) == 24 for output in outputs)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"shown": "some"}, "shown is one of"),
        ({"listing": "none"}, "listing is one of full, brief"),
        ({"max_hops": 9}, "max_hops is 1 to 4"),
        ({"num_syllables": 0}, "num_syllables is 1 to 3"),
    ],
)
def test_what_is_none_is_refused(args, told):
    with pytest.raises(RuntimeError, match=told):
        vf.load_environment("lookup", **args)
