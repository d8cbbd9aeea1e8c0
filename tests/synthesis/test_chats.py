"""What of a rollout becomes a chat, and why another does not."""

from __future__ import annotations

import json

import pytest
from tests.synthesis.conftest import row

from mettle.synthesis.chats import Unusable, chats_of
from mettle.synthesis.config import Rules
from mettle.synthesis.selection import select


def test_a_chat_has_calls_and_tools_in_the_form_of_the_chat_api():
    call = json.dumps({"id": "1", "name": "find", "arguments": '{"word": "a"}'})
    completion = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "A"},
        {"role": "assistant", "content": "A"},
        {"role": "tool", "tool_call_id": "2", "content": "unread"},
    ]
    tools = [{"name": "find", "description": "d", "parameters": {"type": "object"}, "strict": None}]
    [chat] = chats_of(row(completion=completion, tool_defs=tools), "keep")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.messages[2]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"word": "a"}'}}
    ]
    assert chat.tools == [
        {"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object"}}}
    ]


def test_each_user_turn_is_a_chat_of_its_own():
    completion = [
        {"role": "assistant", "content": "5"}, {"role": "user", "content": "lower"},
        {"role": "assistant", "content": "3"}, {"role": "user", "content": "right"},
    ]  # fmt: skip
    chats = chats_of(row(completion=completion), "keep")
    assert [chat.messages[-1]["content"] for chat in chats] == ["5", "3"]
    assert [(chat.turn, chat.num_turns) for chat in chats] == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("<think>hm\n</think>\n\n42", "42"),
        ("hm, so it is</think>42", "42"),
        ("42 <think>and then", "42"),
        ("a <b> 42", "a <b> 42"),
    ],
)
def test_thoughts_are_stripped_whole_or_kept(said, kept):
    message = {"role": "assistant", "content": said, "reasoning_content": "secret"}
    [chat] = chats_of(row(completion=[message]), "strip")
    assert chat.messages[-1] == {"role": "assistant", "content": kept}
    [chat] = chats_of(row(completion=[message]), "keep")
    assert chat.messages[-1] == message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": "bare text", "completion": "more"}, "not a conversation"),
        ({"completion": []}, "no answer"),
        ({"completion": [{"role": "assistant", "content": "<think>only"}]}, "an empty answer"),
        ({"completion": [{"role": "assistant", "tool_calls": ["{"]}]}, "a message that cannot be read"),
        (
            {"completion": [{"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": "{"}]}]},
            "a message that cannot be read",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "not text alone",
        ),
    ],
)
def test_what_no_chat_can_be_made_of_is_left_out_by_reason(changes, reason):
    with pytest.raises(Unusable, match=reason):
        chats_of(row(**changes), "strip")
    assert select([row(**changes)], Rules(min_reward=0.5, reasoning="strip")).left_out == {reason: 1}
