"""The answers that a reward is tried on: right, wrong, void, and right ones that look odd.

Parts: `Case`; `data_cases`, `shown_cases`, `void_cases`, `custom_case`. Each kind belongs to a family: `gold`, `wrong`
(a definite answer that is not the right one), `void` (no answer at all), `odd` (the right one, said unusually).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mettle.quality.rewards.golds import Gold, wrong_answers
from mettle.quality.rewards.layouts import LAYOUTS, THOUGHT, AnswerLayout, user_text
from mettle.quality.rewards.scripts import Policy
from mettle.records.messages import messages_from

Family = Literal["gold", "wrong", "void", "odd"]
REFUSAL = "I'm sorry, but I can't help with that."
NONSENSE = "xyzzy"
LONG_WORDS = 20_000

MEANING: dict[str, str] = {
    "gold": "the right answer in the format that the environment reads",
    "other-demonstration": "what the environment shows for another row",
    "other-row": "the right answer of another row",
    "near-miss": "the right answer with one digit, letter, value or line changed",
    "other-day": "the day before or after",
    "off-by-one": "one more or less in the last number: a minute, a version, a Roman numeral",
    "swapped-order": "two items in each other's place, where an order is asked for",
    "other-case": "the other case, where answers differ in nothing else",
    "negation": "the opposite of the right answer",
    "other-choice": "another of the choices",
    "empty": "nothing",
    "whitespace": "space and line ends",
    "empty-in-format": "the format with nothing in it",
    "nonsense": "a word that means nothing, in the format",
    "refusal": REFUSAL,
    "prompt-echo": "the question, said back",
    "malformed": "the right answer in another format",
    "gold-with-extra": "the right answer with talk before and after",
    "very-long": "the right answer after 100,000 characters",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One answer to row `row_index`."""

    kind: str
    family: Family
    row_index: int
    policy: Policy


def data_cases(row_index: int, gold: Gold, layout: AnswerLayout, *, has_gold: bool, is_single: bool) -> Iterator[Case]:
    """Answers made from the right one; `has_gold`: the right one itself is shown by the environment.

    In a conversation "not" and a word is no wrong answer but talk around it.
    """
    said = layout.write(gold.value)
    if not has_gold:
        yield Case("gold", "gold", row_index, said)
    for kind, text in wrong_answers(gold).items():
        if is_single or not text.startswith("not "):
            yield Case(kind, "wrong", row_index, layout.write(text))
    yield Case("nonsense", "void", row_index, layout.write(NONSENSE))
    if layout.name != "plain":
        yield Case("empty-in-format", "void", row_index, layout.write(""))
    other = LAYOUTS["boxed" if layout.name == "plain" else "plain"]
    yield Case("malformed", "odd", row_index, other.write(gold.value))
    yield Case("gold-with-extra", "odd", row_index, f"{THOUGHT}\n\n{said}\n\nI hope this helps!")
    yield Case("very-long", "odd", row_index, "word " * LONG_WORDS + "\n" + said)


def shown_cases(env: Any, row_index: int, rows: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    """What the environment shows for a row, and what it shows for another row, where that begins differently."""
    row = rows[row_index]
    shown = _shown(env, row)
    if shown is None:
        return
    yield Case("gold", "gold", row_index, shown)
    for other in (*rows[row_index + 1 :], *rows[:row_index]):
        if _first_turn(env, row, other) != _first_turn(env, row, row):
            policy = _shown(env, other)
            assert policy is not None, "it has a first turn"
            yield Case("other-demonstration", "wrong", row_index, _lenient(policy))
            return


def void_cases(row_index: int, row: Mapping[str, Any]) -> Iterator[Case]:
    """No answer at all."""
    texts = {"empty": "", "whitespace": " \n\t \n", "refusal": REFUSAL, "prompt-echo": user_text(row)}
    for kind, text in texts.items():
        if kind != "prompt-echo" or text.strip():
            yield Case(kind, "void", row_index, text)


def source_of_cases(cases: Sequence[Case]) -> str:
    """Where right answers come from: what the environment shows, its data, or nothing."""
    golds = [case for case in cases if case.family == "gold"]
    if not golds:
        return "nothing"
    return "data" if all(isinstance(case.policy, str) for case in golds) else "demonstrations"


def custom_case(name: str, row_index: int, completion: Any) -> Case:
    """A case that somebody wrote down: text, one message, or a list of messages."""
    return Case(name, "odd", row_index, _as_policy(completion))


def _shown(env: Any, row: Mapping[str, Any]) -> Policy | None:
    demonstrate = getattr(env, "demonstrate", None)
    if demonstrate is not None:
        return lambda prompt: demonstrate(prompt, row)
    shown = row.get("demonstration")
    if not shown:
        return None
    turns = [{"content": shown}] if isinstance(shown, str) else list(shown)
    return [turn for turn in turns if turn.get("role", "assistant") == "assistant"]


def _lenient(policy: Policy) -> Policy:
    """The policy in a conversation that is not its own, where it may fail: then it has nothing to say."""
    if not callable(policy):
        return policy

    async def say(prompt: Any) -> Any:
        try:
            said = policy(prompt)
            return await said if inspect.isawaitable(said) else said
        except Exception:
            return ""

    return say


def _first_turn(env: Any, row: Mapping[str, Any], shown_row: Mapping[str, Any]) -> Any:
    """What is said first to `row` when it is taken for `shown_row`; None when only a running loop could tell."""
    demonstrate = getattr(env, "demonstrate", None)
    if demonstrate is None:
        shown = shown_row.get("demonstration")
        return shown if isinstance(shown, str) or not shown else shown[0]
    if inspect.iscoroutinefunction(demonstrate):
        return None
    try:
        said = demonstrate(messages_from(row.get("prompt")), shown_row)
    except Exception:  # a demonstration that fails is seen when it is tried
        return None
    return dict(said) if isinstance(said, Mapping) else said


def _as_policy(completion: Any) -> Policy:
    if isinstance(completion, str | Mapping):
        return completion
    assert isinstance(completion, Sequence), "checked when the file was read"
    return [turn for turn in completion if isinstance(turn, str) or turn.get("role", "assistant") == "assistant"]
