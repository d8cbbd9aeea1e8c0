"""How an answer has to look so that an environment finds it: in tags, in a box, after `####`, alone.

Parts: `AnswerLayout`, `layouts_for` (those worth trying, likeliest first), `LAYOUTS` (by name). What decides is the
parser, then what the prompt asks for; which of them is right is found out by trying (`reward_test`). Invariant: a
layout writes any text, the empty one too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mettle.envs.parsers.think_parser import ThinkParser
from mettle.envs.parsers.xml_parser import XMLParser
from mettle.records.messages import content_text

THOUGHT = "Let me work it out step by step."


@dataclass(frozen=True, slots=True)
class AnswerLayout:
    """`write(answer)` is a whole answer of a model."""

    name: str
    write: Callable[[str], str]


def _json_answer(answer: str) -> str:
    return json.dumps({"answer": answer}, ensure_ascii=False)


LAYOUTS: dict[str, AnswerLayout] = {
    layout.name: layout
    for layout in (
        AnswerLayout("plain", lambda answer: answer),
        AnswerLayout("boxed", lambda answer: f"{THOUGHT}\n\\boxed{{{answer}}}"),
        AnswerLayout("hash", lambda answer: f"{THOUGHT}\n#### {answer}"),
        AnswerLayout("answer-tag", lambda answer: f"{THOUGHT}\n<answer>{answer}</answer>"),
        AnswerLayout("phrase", lambda answer: f"{THOUGHT}\nThe answer is {answer}"),
        AnswerLayout("answer-line", lambda answer: f"{THOUGHT}\nAnswer: {answer}"),
        AnswerLayout("last-line", lambda answer: f"{THOUGHT}\n{answer}"),
        AnswerLayout("fenced", lambda answer: f"{THOUGHT}\n```python\n{answer}\n```"),
        AnswerLayout("json", _json_answer),
    )
}
_MENTIONS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("boxed", re.compile(r"\\boxed|boxed\{")),
    ("hash", re.compile(r"####")),
    ("answer-tag", re.compile(r"<answer>")),
    ("fenced", re.compile(r"```")),
    ("json", re.compile(r"\bjson\b", re.IGNORECASE)),
    ("phrase", re.compile(r"the answer is", re.IGNORECASE)),
    ("answer-line", re.compile(r"\banswer:", re.IGNORECASE)),
    ("last-line", re.compile(r"last line", re.IGNORECASE)),
)
"""What a prompt that asks for a layout says."""


def layouts_for(parser: Any, rows: Sequence[Mapping[str, Any]]) -> list[AnswerLayout]:
    """Every layout, likeliest first: the parser's, those that the prompts ask for, the answer alone, the others."""
    text = "\n".join(prompt_text(row) for row in rows)
    order = [name for name, pattern in _MENTIONS if pattern.search(text)]
    found = [*_of_parser(parser), *(LAYOUTS[name] for name in (*order, *LAYOUTS))]
    unique = list({layout.name: layout for layout in found}.values())
    if isinstance(parser, ThinkParser):
        unique = [_thinking(layout) for layout in unique]
    return unique


def asked_for(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The name of the layout that the prompts ask for, when they ask for exactly one."""
    text = "\n".join(prompt_text(row) for row in rows)
    names = [name for name, pattern in _MENTIONS[:3] if pattern.search(text)]
    return names[0] if len(names) == 1 else None


def prompt_text(row: Mapping[str, Any], *, roles: Sequence[str] = ()) -> str:
    """The prompt of a row as text; only messages of these roles where some are given."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    chosen = [m for m in prompt or [] if not roles or m.get("role") in roles]
    return "\n".join(content_text(message.get("content")) for message in chosen)


def user_text(row: Mapping[str, Any]) -> str:
    """What the user says last in the prompt of a row."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    said = [content_text(m.get("content")) for m in prompt or [] if m.get("role") in ("user", "text")]
    return said[-1] if said else ""


def _of_parser(parser: Any) -> Iterator[AnswerLayout]:
    if not isinstance(parser, XMLParser):
        return
    fields, answer_field = parser.get_fields(), parser.answer_field

    def write(answer: str) -> str:
        values = {name: THOUGHT for name in fields}
        values[answer_field] = answer
        return parser.format(**values)

    try:
        write("x")
    except ValueError:  # the answer is read under an alternative name of a field
        return
    yield AnswerLayout("xml", write)


def _thinking(layout: AnswerLayout) -> AnswerLayout:
    return AnswerLayout(layout.name, lambda answer: f"<think>\n{THOUGHT}\n</think>\n\n{layout.write(answer)}")
