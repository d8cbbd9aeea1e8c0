"""Names and calls that published environments make, which no release documented well."""

from __future__ import annotations

import asyncio

import pytest

import mettle.envs as vf
from mettle.envs.state import new_state
from mettle.errors import UserError


def test_a_system_message_is_the_text_of_a_file(tmp_path):
    (tmp_path / "system.txt").write_text("Be exact.\n", encoding="utf-8")
    assert vf.SystemMessage.from_path(tmp_path / "system.txt") == {"role": "system", "content": "Be exact.\n"}


async def test_a_tool_rubric_counts_for_other_rubrics_too():
    called = vf.AssistantMessage(tool_calls=[{"id": "1", "name": "add", "arguments": "{}"}])
    rubric = vf.ToolRubric(tools=[])
    assert await rubric.total_tool_calls([called, called]) == 2.0
    state = new_state({"prompt": []}, None, "m", {}, [])
    state["completion"] = [called]
    other = vf.Rubric(funcs=[rubric.total_tool_calls])
    await other.score_rollout(state)
    assert state["reward"] == 1.0
    assert state["metrics"] == {"total_tool_calls": 1.0}


async def test_a_group_of_rubrics_takes_the_semaphore_of_018():
    def long(completion):
        return float(len(completion[0]["content"]))

    group = vf.RubricGroup([vf.Rubric(funcs=[long]), vf.Rubric(funcs=[long])])
    states = [new_state({"prompt": []}, None, "m", {}, []) for _ in range(2)]
    for state, text in zip(states, ("a", "abc"), strict=True):
        state["completion"] = [vf.AssistantMessage(content=text)]
    await group.score_group(states, asyncio.Semaphore(1))
    assert [(state["reward"], state["advantage"]) for state in states] == [(2.0, -2.0), (6.0, 2.0)]
    await group.score_rollout(states[0], asyncio.Semaphore(1))
    assert states[0]["reward"] == 2.0


@pytest.mark.parametrize(
    "columns",
    [{"question": ["one", "two"], "answer": ["1", "2"]},
     {"prompt": [[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]], "answer": ["1", "2"]}],
    ids=["questions", "prompts"],
)  # fmt: skip
async def test_generate_takes_a_dict_of_columns(scripted, columns):
    def known(answer):
        return float(answer)

    env = vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=vf.Rubric(funcs=[known]))
    results = await env.generate(columns, scripted("hi"), "m")
    outputs = sorted(results["outputs"], key=lambda output: output["example_id"])
    assert [output["reward"] for output in outputs] == [1.0, 2.0]
    assert [output["prompt"][-1]["content"] for output in outputs] == ["one", "two"]


def test_what_is_dumped_can_be_chosen():
    message = vf.AssistantMessage(content="hi", tool_calls=[{"id": "1", "name": "f", "arguments": "{}"}])
    assert message.model_dump(include={"role"}) == {"role": "assistant"}
    assert message.model_dump(exclude={"tool_calls": {"__all__": {"id", "arguments"}}})["tool_calls"] == [{"name": "f"}]
    assert "content" not in message.model_dump(exclude={"content"}, exclude_none=True)


def test_endpoints_are_read_under_the_names_of_every_release(tmp_path):
    (tmp_path / "endpoints.py").write_text(
        "ENDPOINTS = {'one': {'model': 'm', 'url': 'http://a/v1', 'key': 'A'},"
        " 'two': [{'model': 'n', 'url': 'http://b/v1', 'key': 'B', 'type': 'anthropic_messages'}]}\n"
    )
    found = vf.load_endpoints(str(tmp_path))
    assert (found["one"][0]["url"], found["one"][0]["key"], found["one"][0].base_url) == (
        "http://a/v1",
        "A",
        "http://a/v1",
    )
    assert found["two"][0]["api_client_type"] == "anthropic_messages"
    (tmp_path / "endpoints.toml").write_text(
        '[[endpoint]]\nendpoint_id = "x"\nmodel = "m"\nurl = "http://c/v1"\nkey = "C"\n' * 2
    )
    found = vf.load_endpoints(tmp_path)
    assert [row["api_key_var"] for row in found["x"]] == ["C", "C"]
    assert vf.load_endpoints(tmp_path / "nowhere.toml") == {}
    (tmp_path / "bad.py").write_text("ENDPOINTS = {'x': {}}\n")
    with pytest.raises(UserError, match=r"cannot read endpoints from .*bad.py: KeyError"):
        vf.load_endpoints(tmp_path / "bad.py")
