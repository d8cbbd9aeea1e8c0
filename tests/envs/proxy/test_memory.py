"""An agent repeats the conversation in its own words: what is recognised, and what is a rewritten history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.clients.dialects import chat, messages, responses
from mettle.envs.proxy.memory import Memory
from mettle.records.messages import AssistantMessage, Response, ResponseMessage, Usage, messages_from

PROMPT = messages_from([{"role": "user", "content": "q"}])
CALLS = [{"id": "c1", "name": "look", "arguments": '{"a": 1, "b": [2]}'}]
SAID = AssistantMessage(content=" yes\n", reasoning_content="hm", tool_calls=CALLS)


def after(message):
    return [*PROMPT, message, *messages_from([{"role": "tool", "tool_call_id": "c1", "content": "r"}])]


@pytest.fixture
def memory():
    made = Memory()
    made.remember(made.recognise(PROMPT), SAID, {"step": 1})
    return made


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reasoning_content": None},
        {"content": "yes"},
        {"tool_calls": [{"id": "c1", "name": "look", "arguments": '{"b":[2],"a":1}'}]},
        {"reasoning_content": "hm\n"},
    ],
)
def test_the_same_message_in_other_words_is_the_sampled_one(memory, changes):
    repeated = AssistantMessage({**SAID, **changes})
    found = memory.recognise(after(repeated))
    assert found[1] is SAID
    assert memory.step_before(found) == {"step": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"content": "no"},
        {"content": ""},
        {"reasoning_content": "another thought"},
        {"tool_calls": None},
        {"tool_calls": [{"id": "c1", "name": "look", "arguments": '{"a": 2, "b": [2]}'}]},
        {"tool_calls": [{"id": "c2", "name": "look", "arguments": '{"a": 1, "b": [2]}'}]},
        {"tool_calls": [{"id": "c1", "name": "look", "arguments": "not json"}]},
    ],
)
def test_a_message_that_says_something_else_stays_what_the_agent_made_of_it(memory, changes):
    rewritten = AssistantMessage({**SAID, **changes})
    assert memory.recognise(after(rewritten))[1] is rewritten


def test_the_same_words_after_another_history_are_not_the_sampled_ones(memory):
    other = messages_from([{"role": "user", "content": "another q"}])
    repeated = AssistantMessage(SAID)
    found = memory.recognise([*other, repeated])
    assert found[1] is repeated
    assert memory.step_before(found) is None


def test_a_long_conversation_is_kept_once_however_often_it_is_sent(memory):
    first = memory.recognise(after(AssistantMessage(SAID)))
    second = memory.recognise(after(AssistantMessage(SAID)))
    assert all(a is b for a, b in zip(first, second, strict=True))


TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=12)
ARGUMENTS = st.dictionaries(TEXT, st.integers() | TEXT | st.none() | st.lists(st.booleans(), max_size=2), max_size=3)
NAMES = st.text(alphabet="abc_", min_size=1, max_size=5)


@st.composite
def answers(draw):
    """Whatever a model may say."""
    import json

    calls = [
        {"id": f"call_{index}", "name": draw(NAMES), "arguments": json.dumps(draw(ARGUMENTS))}
        for index in range(draw(st.integers(0, 3)))
    ]
    content = draw(TEXT if not calls else TEXT | st.none())
    return ResponseMessage(
        content=content, reasoning_content=draw(st.none() | TEXT), tool_calls=calls or None, finish_reason="stop"
    )


def echoed(dialect, answer):
    """The answer as an agent of each API puts it into the next request."""
    if dialect is chat:
        return {"messages": [{"role": "user", "content": "q"}, answer["choices"][0]["message"]]}
    if dialect is messages:
        return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer["content"]}]}
    return {"input": [{"role": "user", "content": "q"}, *answer["output"]]}


@pytest.mark.parametrize("dialect", [chat, messages, responses], ids=lambda d: d.NAME)
@given(message=answers())
def test_whatever_is_answered_is_recognised_when_it_comes_back(dialect, message):
    ask = {"messages": [{"role": "user", "content": "q"}], "input": "q"}
    call = dialect.read_call(ask)
    response = Response(id="r", created=0, model="m", usage=Usage(), message=message)
    memory = Memory()
    said = message.to_assistant()
    memory.remember(memory.recognise(call.messages), said, "step")
    assert list(dialect.answer_events(call, dialect.answer_body(call, response)))
    again = memory.recognise(dialect.read_call(echoed(dialect, dialect.answer_body(call, response))).messages)
    if not said.content and not said.tool_calls and dialect is messages and not message.reasoning_content:
        return  # Anthropic's API has no way to repeat an answer that says nothing
    assert again[1] is said
    assert memory.step_before(again) == "step"
