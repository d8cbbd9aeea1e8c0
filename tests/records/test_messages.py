"""Messages are dicts with attributes, whatever form they came in."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from mettle.records.messages import (
    AssistantMessage,
    ResponseMessage,
    SystemMessage,
    TextMessage,
    ToolCall,
    UserMessage,
    message_from,
    messages_from,
)

NESTED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_a_message_is_a_dict_and_has_attributes():
    message = UserMessage(content="hi")
    assert isinstance(message, dict)
    assert message == {"role": "user", "content": "hi"}
    assert (message.role, message["content"], message.get("x", 1)) == ("user", "hi", 1)
    message.content = "ho"
    assert json.loads(message.model_dump_json()) == {"role": "user", "content": "ho"}
    with pytest.raises(AttributeError, match="no field 'colour'"):
        _ = message.colour


def test_a_known_field_that_is_absent_reads_as_none():
    message = AssistantMessage(content="x")
    assert message.tool_calls is None
    assert message["reasoning_content"] is None
    assert "tool_calls" not in message


@pytest.mark.parametrize("raw", [NESTED, {"id": "c", "name": "f", "arguments": {}}, json.dumps(NESTED)])
def test_tool_calls_become_flat_from_every_form(raw):
    call = AssistantMessage(tool_calls=[raw]).tool_calls[0]
    assert call == ToolCall(id="c", name="f", arguments="{}")
    assert call.function.name == call["function"]["name"] == "f"


def test_copies_and_pickles_keep_the_class():
    message = AssistantMessage(content="x", tool_calls=[NESTED])
    for other in (copy.deepcopy(message), pickle.loads(pickle.dumps(message)), message.model_copy(deep=True)):
        assert other == message
        assert type(other) is AssistantMessage
        assert type(other.tool_calls[0]) is ToolCall
    changed = message.model_copy(deep=True, update={"content": "y"})
    changed.tool_calls[0]["name"] = "g"
    assert (message.content, message.tool_calls[0].name) == ("x", "f")


def test_conversations_are_read_from_every_form():
    class Pydantic:
        def model_dump(self, **_):
            return {"role": "system", "content": "s"}

    read = messages_from([Pydantic(), {"role": "user", "content": "u"}, AssistantMessage(content="a")])
    assert [type(message) for message in read] == [SystemMessage, UserMessage, AssistantMessage]
    assert messages_from("text") == [TextMessage(content="text")]
    with pytest.raises(TypeError, match="unknown message role 'boss'"):
        message_from({"role": "boss"})
    with pytest.raises(TypeError, match="not int"):
        message_from(3)


def test_a_response_message_leaves_its_bookkeeping_behind():
    message = ResponseMessage(content="x", reasoning_content=None, finish_reason="stop", tokens=None)
    assert message.to_assistant() == {"role": "assistant", "content": "x"}
    assert UserMessage(content=[{"type": "text", "text": "a"}, {"type": "image_url"}]).text == "a"
