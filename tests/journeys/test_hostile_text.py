"""Whatever a model writes, twice as much of it costs at most 2.3 times the time, wherever it is read.

Every parser, reward function of a shipped environment or of a recipe for data, judge prompt, renderer, tool parser and page is given texts
that make patterns with overlapping repeats, searches that start anew and growing buffers slow. What is measured is
processor time of this thread, the least of several tries, so that a busy host changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mettle.envs as vf
from mettle.clients.answer_length import MAX_ANSWER_CHARS
from mettle.clients.chat_template import ChatTemplate
from mettle.clients.dialects.call import arguments_object
from mettle.clients.errors import InvalidModelResponseError
from mettle.clients.tool_parser import parse_turn
from mettle.envs.parsers.code_parser import CodeParser
from mettle.envs.proxy.memory import _call_key
from mettle.envs.rubrics.hybrid_math_rubric import verdict_of
from mettle.envs.rubrics.judge_prompt import DEFAULT_JUDGE_PROMPT, question_of, render
from mettle.envs.tool_env import total_tool_calls
from mettle.errors import MettleError
from mettle.evals.output import record_of
from mettle.hub.conversation import text_of
from mettle.inference.text import TurnSplitter
from mettle.quality.data.formats import CHOICE_LINE, FORMATS, AnswerFormat
from mettle.quality.data.recipes import recipe_for
from mettle.quality.lint.linter import lint_source
from mettle.records.messages import ResponseMessage
from mettle.synthesis.chats import Unusable, chats_of
from mettle.synthesis.duplicates import Seen
from mettle.tui.markdown import MAX_MARKDOWN_CHARS, markdown_lines
from mettle.wording import one_line, printable

MOST = 2.3
SMALL, DOUBLINGS = 4_000, 3
NOTHING_S = 0.002
"""What costs less than this for the longest text has nothing in it that grows with the square: that costs 60 times."""
ROOT = Path(__file__).resolve().parents[2]

UNITS = {
    "newlines after a tag": ("<answer>", "\n"),
    "spaces after a tag": ("<think>", " "),
    "tags never closed": ("", "<answer>"),
    "thoughts never closed": ("", "<think>"),
    "ends of thoughts": ("", "</think>"),
    "closing tags": ("", "</answer>"),
    "boxes never closed": ("", "\\boxed{"),
    "boxes with space": ("", "\\boxed{ "),
    "a box of braces": ("\\boxed{", "{"),
    "closing braces": ("\\boxed{", "}"),
    "calls never closed": ("", "<tool_call>"),
    "a call of space": ("<tool_call>", " \n"),
    "a call of brackets": ("<tool_call>", "["),
    "calls of nothing": ("", "<tool_call></tool_call>"),
    "fences with marks": ("", "~~~ x\n"),
    "fences of every length": ("", None),
    "a fence and spaces": ("```", " "),
    "a long fence": ("", "~"),
    "fences": ("", "```\n"),
    "newlines": ("", "\n"),
    "spaces": ("", " "),
    "a letter and spaces": ("A", " "),
    "digits": ("", "9"),
    "minus signs": ("", "-"),
    "letters": ("", "a"),
    "words": ("", "bet "),
    "hashes": ("", "####"),
    "brackets": ("", "["),
    "colons": ("", "a:"),
    "quotes": ("", '"'),
    "backslashes": ("", "\\"),
    "stars": ("", "*a **"),
    "accents": ("e", "\u0301"),
    "halves of pairs": ("", "\ud800"),
    "verdicts": ("", "yes "),
    "numbers": ("", "1 "),
    "choices": ("A) ", "\n"),
    "items": ("[a", " , and "),
    "arrows": ("", " -> "),
    "bullets": ("", "- 1. "),
    "parts of a version": ("v", "1."),
    "numerals": ("", "M"),
    "days of the week": ("", "on the mon, "),
}


def hostile(shape: str, num_chars: int) -> str:
    """About `num_chars` of a shape, with something after it that no pattern wants there."""
    head, unit = UNITS[shape]
    if unit is None:  # each one shorter than the one before, so that none closes any
        most = int(math.sqrt(2 * num_chars))
        return "\n".join("~" * length + " x" for length in range(most, 2, -1))
    return head + unit * (num_chars // len(unit)) + "!"


def said(text: str) -> list[Any]:
    return [vf.AssistantMessage(content=text)]


def streamed(text: str) -> None:
    """The text as it comes from an engine, a few characters a token."""
    for has_tools, is_thinking in ((True, False), (True, True), (False, False)):
        splitter = TurnSplitter(has_tools=has_tools, is_thinking=is_thinking)
        for at in range(0, len(text), 16):
            splitter.add(text[at : at + 16])
        splitter.finish()
        assert splitter.tail is not None


def asked_of_a_judge(text: str) -> str:
    return render(DEFAULT_JUDGE_PROMPT, question_of(said(text)), text, text, is_fenced=True)


def rendered(text: str) -> str:
    source = (ROOT / "src/mettle/trainer/chat_template.jinja").read_text(encoding="utf-8")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": "c"},
    ]
    return ChatTemplate(source).render(messages, None, add_generation_prompt=True)


def published(text: str) -> Any:
    return record_of({"prompt": [{"role": "user", "content": text}], "completion": said(text), "answer": text})


def chats(text: str) -> Any:
    row = {"prompt": [{"role": "user", "content": text}], "completion": [{"role": "assistant", "content": text}]}
    return chats_of(row, "strip")


def linted(text: str) -> Any:
    source = f"def reward(completion, answer):\n    return {json.dumps(text)} in completion\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rewards.py"
        path.write_text(source)
        return lint_source(path)


@cache
def module(folder: str, name: str) -> Any:
    """A module of a shipped environment."""
    path = str(ROOT / folder)
    if path not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module(name)


@cache
def library() -> Any:
    """The encyclopedia of wiki_search, small."""
    wiki = module("environments/wiki_search", "wiki_search")
    return wiki.Library({"Aba": {"History": "a bet on words", "Rivers": "yes"}})


def of_reverse_text(text: str) -> None:
    reverse = module("environments/reverse_text", "reverse_text")
    reverse.position(said(text), "abc", {"is_truncated": False})
    reverse.ratio(said(text), "abc")
    reverse.exact_match(said(text), "abc")


def of_arithmetic(text: str) -> None:
    arithmetic = module("environments/arithmetic", "arithmetic")
    for parser in (vf.Parser(), vf.XMLParser(["answer"])):
        arithmetic.correct(said(text), "7", parser)
        arithmetic.is_number(said(text), parser)


def of_wiki_search(text: str) -> None:
    wiki, parser = module("environments/wiki_search", "wiki_search"), vf.XMLParser(["answer"])
    wiki.correct(said(text), "Aba", parser)
    wiki.same(text, "Aba")
    wiki.format_has_answer(said(text), parser)
    for tool in (library().search_pages, library().list_sections, library().read_section):
        tool(text)


def of_textarena(text: str) -> None:
    arena = module("adapters/textarena", "mettle_textarena.env")
    list(filter(arena.SPEAKER.match, arena.BRACKETED.findall(text)))


def of_gym(text: str) -> None:
    gym = module("adapters/gym", "mettle_gym.env")
    space = type("Discrete", (), {"contains": lambda self, action: action == 0})()
    action = gym.GymEnv._action
    try:
        action(SimpleNamespace(action_parser=None), text, SimpleNamespace(action_space=space))
    except ValueError:
        return


@cache
def made_of_data(name: str) -> dict[str, Any]:
    """What a recipe puts into an environment that is made of data, loaded."""
    found: dict[str, Any] = {}
    exec(recipe_for(AnswerFormat(name, 1.0, (), labels=("7", "8"))).code(), found)
    return found


def by_a_recipe(name: str) -> Callable[[str], object]:
    def read(text: str) -> None:
        made = made_of_data(name)
        for written in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}", f"#### {text}"):
            for function in ("correct", "overlap", "answer_format"):
                asked = {"answer": "7"} if function != "answer_format" else {}
                if function in made:
                    made[function](completion=said(written), parser=made["parser"], **asked)

    return read


XML = vf.XMLParser(["think", ("answer", "a")])
THINK = vf.ThinkParser()
READERS: dict[str, Callable[[str], object]] = {
    "Parser": lambda text: vf.Parser().parse_answer(said(text)),
    "ThinkParser": lambda text: (THINK.parse(text), THINK.get_format_reward_func()(completion=said(text))),
    "MaybeThinkParser": lambda text: vf.MaybeThinkParser().parse(text),
    "XMLParser.parse": lambda text: (XML.parse(text), XML.parse(text, last=True), XML.parse(text, strip=False)),
    "XMLParser.format_reward": lambda text: XML.get_format_reward_func()(completion=said(text)),
    "CodeParser": lambda text: CodeParser().parse(text),
    "extract_boxed_answer": lambda text: (vf.extract_boxed_answer(text), vf.extract_boxed_answer(text, strict=True)),
    "extract_hash_answer": vf.extract_hash_answer,
    "MathRubric, judge's verdict": verdict_of,
    "judge prompt": asked_of_a_judge,
    "tool calls of a turn": lambda text: parse_turn(text, has_tools=True, new_id=lambda: "c"),
    "turn without tools": lambda text: parse_turn(text, has_tools=False),
    "chat template": rendered,
    "turn as it is streamed": streamed,
    "arguments of a call": lambda text: (arguments_object(text), _call_key({"arguments": text})),
    "counted tool calls": lambda text: total_tool_calls([{"tool_calls": [{"arguments": text}]}]),
    "published row": published,
    "chats": chats,
    "duplicates": lambda text: Seen(0.8).verdict(text, text),
    "shown text": lambda text: (printable(text), one_line(text), text_of(text)),
    "shown markdown": lambda text: markdown_lines(text[:MAX_MARKDOWN_CHARS], 80, is_dark=True),
    "choices of a row": lambda text: (CHOICE_LINE.findall(text), CHOICE_LINE.split(text)),
    "lint": linted,
    "arithmetic": of_arithmetic,
    "kuhn_poker": lambda text: module("environments/kuhn_poker", "kuhn_poker").read_word(said(text)[0]),
    "nim": lambda text: module("environments/nim", "nim").last_number(said(text)[0]),
    "number_guess": lambda text: module("environments/number_guess", "number_guess").last_guess(
        {"trajectory": [{"is_truncated": False, "completion": said(text)}]}
    ),
    "reverse_text": of_reverse_text,
    "science_choice": lambda text: module("environments/science_choice", "science_choice").given_letter(text),
    "wiki_search": of_wiki_search,
    "wordle": lambda text: module("environments/wordle", "wordle").read_guess(text),
    "textarena": of_textarena,
    "gym": of_gym,
    **{f"recipe for {name}": by_a_recipe(name) for name in FORMATS if name != "code"},
}


COSTLY = {"shown markdown": 16, "duplicates": 8, "chat template": 4}
"""What costs a hundred times the others for each character is given so many times less."""


def cost_s(read: Callable[[str], object], text: str, tries: int) -> float:
    """The least processor time of some tries."""
    best = math.inf
    for _ in range(tries):
        started = time.thread_time()
        with contextlib.suppress(MettleError, Unusable):  # What says nothing is refused; what counts is how soon.
            read(text)
        best = min(best, time.thread_time() - started)
    return best


def growth(read: Callable[[str], object], shape: str, size: int = SMALL) -> float:
    """How much more a text of twice the length costs, over some doublings; 1 for what costs next to nothing.

    Short and long text take turns, and the least of each counts. What a neighbour on the same processor adds comes in
    spells of a tenth of a second, so what looks too costly is measured again after ever longer pauses.
    """
    small, large = hostile(shape, size), hostile(shape, size << DOUBLINGS)
    least, most, found = math.inf, math.inf, math.inf
    for pause_s in (0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 1.6):
        time.sleep(pause_s)
        for _ in range(1 if pause_s == 0 else 9):
            most = min(most, cost_s(read, large, 1))
            if most < NOTHING_S:
                return 1.0
            least = min(least, cost_s(read, small, 4))
        found = (most / max(least, 1e-6)) ** (1 / DOUBLINGS)
        if found <= MOST:
            break
    return found


@pytest.mark.parametrize("reader", READERS)
def test_twice_the_text_costs_twice_the_time(reader: str) -> None:
    read = READERS[reader]
    cost_s(read, "x", 1)  # what is imported and built once
    gc.disable()
    try:
        found = {shape: growth(read, shape, SMALL // COSTLY.get(reader, 1)) for shape in UNITS}
    finally:
        gc.enable()
    assert {shape: round(times, 2) for shape, times in found.items() if times > MOST} == {}


def test_a_pattern_that_starts_anew_is_found() -> None:
    """The measure sees what it is there for."""
    pattern = re.compile(r"\\boxed\{(?P<inside>[^}]*)\}")
    assert growth(pattern.search, "newlines") <= MOST
    assert growth(pattern.search, "boxes never closed", 500) > MOST


def test_the_issues_own_texts_take_milliseconds() -> None:
    for text in ("<answer>" + "\n" * 3200, "\\boxed{" * 40_000):
        assert cost_s(lambda said: (XML.parse(said), vf.extract_boxed_answer(said)), text, 5) < 0.1


class Talkative(vf.Client):
    """Answers with so many letters."""

    def __init__(self, num_chars: int) -> None:
        self.num_chars = num_chars

    async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
        text = "a" * self.num_chars
        message = ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
        return vf.Response(id="", created=0, model=model, usage=None, message=message)


def test_an_answer_longer_than_the_limit_reaches_no_parser() -> None:
    """Not even that of an environment whose author brought a slow one."""
    seen: list[int] = []
    parser = vf.Parser(extract_fn=lambda text: seen.append(len(text)) or text)
    rows = [{"question": "say a", "answer": "a"}]
    env = vf.SingleTurnEnv(dataset=rows, parser=parser, rubric=vf.Rubric([read_by], parser=parser))
    row = next(iter(env.get_dataset()))
    short = asyncio.run(env.run_rollout(row, Talkative(MAX_ANSWER_CHARS), "m"))
    long = asyncio.run(env.run_rollout(row, Talkative(MAX_ANSWER_CHARS + 1), "m"))
    assert (short["error"], short["reward"]) == (None, 1.0)
    assert isinstance(long["error"], InvalidModelResponseError)
    assert "1,048,577 characters" in str(long["error"])
    assert set(seen) == {MAX_ANSWER_CHARS}


def read_by(completion: Any, parser: Any) -> float:
    """1 when the parser was given anything."""
    return float(bool(parser.parse_answer(completion)))
