"""Text delta by delta is the text at once, however it is cut."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.clients.renderer import Renderer
from mettle.clients.tool_parser import parse_tool_calls, split_thought
from mettle.inference.text import GrowingText, TurnSplitter, cut_at_stop

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
pieces = st.sampled_from(
    ["<think>", "</think>", CALL, "<tool_call>", "</tool_call>", "<", "<th", "\n", "\n\n", " ", "a", "bc", "é", "d\n"]
)
texts = st.lists(pieces, max_size=12).map("".join)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 263), max_size=30), data=st.data())
def test_deltas_join_to_the_whole_text(renderer: Renderer, ids: list[int], data: st.DataObject) -> None:
    growing = GrowingText(renderer)
    joined = "".join(growing.add(token_id) for token_id in ids) + growing.finish(None)
    assert joined == renderer.visible_text(ids)


@settings(deadline=None)
@given(ids=st.lists(st.integers(128, 255), min_size=40, max_size=80), data=st.data())
def test_bytes_that_are_no_text_are_told_as_they_come(renderer: Renderer, ids: list[int], data: st.DataObject) -> None:
    growing = GrowingText(renderer)
    deltas = [growing.add(token_id) for token_id in ids]
    assert "".join(deltas) + growing.finish(None) == renderer.visible_text(ids)
    assert any(deltas[:32]), "what never becomes text is not held for ever"


def test_a_token_costs_the_same_however_many_came_before(renderer: Renderer) -> None:
    """Not even bytes that never become a character are decoded again and again."""
    decoded = []
    counting = SimpleNamespace(visible_text=lambda ids: decoded.append(len(ids)) or renderer.visible_text(ids))
    for ids in ([0x80] * 500, [0xE2, 0x82] * 250, [0x61] * 500):
        growing = GrowingText(counting, ["stop"])
        for token_id in ids:
            growing.add(token_id)
    assert sum(decoded) < 1500 * 20


@settings(deadline=None)
@given(before=texts, stop=st.sampled_from(["ab", "</think>", "éa", "\n\n", "x"]))
def test_nothing_of_a_stop_string_is_shown(renderer: Renderer, before: str, stop: str) -> None:
    whole = before.partition(stop)[0] + stop
    growing = GrowingText(renderer, [stop, "never said"])
    joined = "".join(growing.add(token_id) for token_id in renderer.encode(whole)) + growing.finish(stop)
    assert joined == cut_at_stop(renderer.visible_text(renderer.encode(whole)), stop)


@given(text=texts, data=st.data())
def test_a_turn_in_pieces_is_the_turn_at_once(text: str, data: st.DataObject) -> None:
    splitter = TurnSplitter(has_tools=True, is_thinking=False)
    parts, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        parts += splitter.add(rest[:size])
        rest = rest[size:]
    parts += splitter.finish()
    content, calls = parse_tool_calls(splitter.tail)
    told = "".join(part.text for part in parts if part.kind == "content") + content
    thought = split_thought(text)
    if not text.lstrip().startswith("<think>") and "</think>" in text:
        return  # a thought that the prompt opened: the server knows it from the prompt, not from the text
    wanted, wanted_calls = parse_tool_calls(thought.rest)
    assert "".join(part.text for part in parts if part.kind == "reasoning") == (thought.reasoning or "")
    assert [(call.name, call.arguments) for call in calls] == [(call.name, call.arguments) for call in wanted_calls]
    assert told == wanted


def test_a_thought_that_the_prompt_opened_is_told_as_one() -> None:
    splitter = TurnSplitter(has_tools=False, is_thinking=True)
    parts = [part for delta in ["h", "m</th", "ink>\n", "a"] for part in splitter.add(delta)]
    assert [("".join(p.text for p in parts if p.kind == kind)) for kind in ("reasoning", "content")] == ["hm", "a"]
