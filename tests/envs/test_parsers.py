"""Answers read out of text and messages."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mettle.envs as vf
from mettle.clients.tool_parser import parse_tool_calls
from mettle.envs.parsers.code_parser import fenced_blocks
from mettle.envs.rubrics.hybrid_math_rubric import verdict_of


def said(*texts):
    return [vf.AssistantMessage(content=text) for text in texts]


def test_the_last_assistant_message_answers():
    parser = vf.Parser(str.upper)
    assert parser.parse_answer([*said("a", "b"), vf.UserMessage(content="c")]) == "B"
    assert parser.parse_answer("a") == "A"
    assert parser.parse_answer([]) is None
    assert parser.parse_answer(said([{"type": "text", "text": "x"}, {"type": "text", "text": "y"}])) == "X Y"
    assert parser.get_format_reward_func()(completion=said("x")) == 1.0


@pytest.mark.parametrize(
    ("text", "think", "maybe"),
    [("<think>a</think> b ", "b", "b"), ("b", "", "b"), ("<think>a</think>b</think>c", "c", "c")],
)
def test_thinking_is_left_out(text, think, maybe):
    assert vf.ThinkParser().parse(text) == think
    assert vf.MaybeThinkParser().parse(text) == maybe


def test_thinking_well_formed():
    score = vf.ThinkParser().get_format_reward_func()
    assert score(completion=said("<think>a</think>b", "b")) == 0.5
    assert score(completion=said("<think>a</think>")) == 0.0


def test_xml_fields_and_alternatives():
    parser = vf.XMLParser(["think", ("code", "answer")], answer_field="code")
    parsed = parser.parse("<think>\n a\n</think><answer> 1 </answer><answer>2</answer>")
    assert (parsed.think, parsed.code, parsed.answer) == ("a", None, "1")
    assert parser.parse("<answer>1</answer><answer>2</answer>", last=True).answer == "2"
    assert parser.get_fields() == ["think", "code"]
    assert parser.parse(parser.format(think="t", answer=5)).code == "5"
    with pytest.raises(ValueError, match="no value for the field 'think'"):
        parser.format(code=1)


def test_xml_answer_of_messages_and_of_text():
    parser = vf.XMLParser(["answer"])
    twice = "<answer>1</answer><answer>2</answer>"
    assert parser.parse_answer(said("<answer>0</answer>", twice, "nothing")) == "1"
    assert parser.parse_answer(twice) == "2"
    assert parser.parse_answer(said("nothing")) is None


@pytest.mark.parametrize(
    ("fields", "error"),
    [(["a", "a"], ValueError), ([()], ValueError), ([3], TypeError), ([("a", 3)], TypeError)],
)
def test_fields_that_make_no_sense(fields, error):
    with pytest.raises(error):
        vf.XMLParser(fields)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<reason>a</reason>\n<answer>b</answer>", 1.0),
        ("<answer>b</answer>", 0.4 * 0.5 + 0.2 + 0.2),
        ("well <reason>a</reason><answer>b</answer> so", 0.4 + 0.2),
        ("nothing", 0.2),  # As in verifiers: no field is spaced wrongly.
    ],
)
def test_xml_format_reward(text, score):
    assert vf.XMLParser(["reason", "answer"]).get_format_reward_func()(completion=said(text)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "answer", "strict"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2}", "2", "2"),
        (r"\boxed{1} and \boxed{2", "1", "1"),
        ("none", "none", ""),
    ],
)
def test_boxed_answers(text, answer, strict):
    assert vf.extract_boxed_answer(text) == answer
    assert vf.extract_boxed_answer(text, strict=True) == strict


def test_hash_answers():
    assert vf.extract_hash_answer("a #### 42 ") == "42"
    assert vf.extract_hash_answer("42") == "42"


@given(st.text(alphabet="<>/answer think\n", max_size=60))
def test_no_text_makes_a_parser_raise_or_score_outside_zero_to_one(text):
    for parser in (vf.Parser(), vf.MaybeThinkParser(), vf.XMLParser(["think", ("answer", "a")])):
        parser.parse_answer(said(text))
        parser.parse_answer(text)
        assert 0.0 <= parser.get_format_reward_func()(completion=said(text)) <= 1.0 + 1e-9


@given(st.text(alphabet="ab{}\\", max_size=20))
def test_what_is_boxed_comes_back_when_its_braces_balance(inside):
    depth, balanced = 0, True
    for character in inside:
        depth += {"{": 1, "}": -1}.get(character, 0)
        balanced = balanced and depth >= 0
    if balanced and depth == 0 and "\\b" not in inside:
        assert vf.extract_boxed_answer(f"x \\boxed{{{inside}}} y") == inside


code_lines = st.sampled_from(
    ["```", "````", "~~~", "```python", "~~~ py", "   ```", "    ```", "x", "", "``` ", "```a`b"]
)
FENCED = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,})(?![`~])[ \t]*(?P<info>[^\n`]*)\n(?P<code>.*?)"
    r"^ {0,3}(?P=fence)[`~]*[ \t]*$",
    re.DOTALL | re.MULTILINE,
)


@given(lines=st.lists(code_lines, max_size=12))
def test_fenced_blocks_are_those_that_a_pattern_finds(lines):
    text = "\n".join(lines)
    wanted = [(found["info"].strip().split(" ")[0].lower(), found["code"]) for found in FENCED.finditer(text)]
    assert fenced_blocks(text) == wanted


def test_a_call_that_nests_too_deeply_is_content():
    text = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    assert parse_tool_calls(text) == (text, ())


@pytest.mark.parametrize(
    ("said", "score"),
    [("A", 1.0), (" b. ", 0.0), ("\\boxed{ A }", 1.0), ("yes, no", 0.0), ("A yes", 1.0), ("It is correct", 1.0)],
)
def test_a_judges_last_word_is_its_verdict(said, score):
    assert verdict_of(said) == score
