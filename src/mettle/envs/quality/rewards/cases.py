"""The answers that a reward is tried on: right, wrong, void, and right ones that look odd.

Parts: `Case`, `cases_from_data`, `cases_from_demonstrations`. Each kind belongs to a family: `gold`, `wrong` (a
definite answer that is not the right one), `void` (no answer at all), `odd` (the right one, said unusually).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mettle.envs.quality.rewards.golds import Gold, wrong_answers
from mettle.envs.quality.rewards.layouts import LAYOUTS, THOUGHT, Layout, user_text
from mettle.envs.quality.rewards.scripts import Policy

Family = Literal["gold", "wrong", "void", "odd"]
REFUSAL = "I'm sorry, but I can't help with that."
LONG_WORDS = 20_000

MEANING: dict[str, str] = {
    "gold": "the right answer in the format that the environment reads",
    "other-row": "the right answer of another row",
    "near-miss": "the right answer with one digit, letter, value or line changed",
    "negation": "the opposite of the right answer",
    "other-choice": "another of the choices",
    "empty": "nothing",
    "whitespace": "space and line ends",
    "empty-in-format": "the format with nothing in it",
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


def cases_from_data(row_index: int, row: Mapping[str, Any], gold: Gold, layout: Layout) -> Iterator[Case]:
    """All kinds of answers to one row."""
    yield Case("gold", "gold", row_index, layout.write(gold.value))
    for kind, text in wrong_answers(gold).items():
        yield Case(kind, "wrong", row_index, layout.write(text))
    yield from _void(row_index, row)
    if layout.name != "plain":
        yield Case("empty-in-format", "void", row_index, layout.write(""))
    other = LAYOUTS["boxed" if layout.name == "plain" else "plain"]
    yield Case("malformed", "odd", row_index, other.write(gold.value))
    said = layout.write(gold.value)
    yield Case("gold-with-extra", "odd", row_index, f"{THOUGHT}\n\n{said}\n\nI hope this helps!")
    yield Case("very-long", "odd", row_index, "word " * LONG_WORDS + "\n" + said)


def cases_from_demonstrations(
    row_index: int, row: Mapping[str, Any], demonstrations: Mapping[str, Policy]
) -> Iterator[Case]:
    """The environment's own scripts, the right one called `gold`, and no answer at all."""
    for name, policy in demonstrations.items():
        yield Case(name, "gold" if name == "gold" else "wrong", row_index, policy)
    yield from _void(row_index, row)


def custom_case(name: str, row_index: int, completion: Any) -> Case:
    """A case that somebody wrote down: text, one message, or a list of messages."""
    return Case(name, "odd", row_index, _as_policy(completion))


def _void(row_index: int, row: Mapping[str, Any]) -> Iterator[Case]:
    texts = {"empty": "", "whitespace": " \n\t \n", "refusal": REFUSAL, "prompt-echo": user_text(row)}
    for kind, text in texts.items():
        if kind != "prompt-echo" or text.strip():
            yield Case(kind, "void", row_index, text)


def _as_policy(completion: Any) -> Policy:
    if isinstance(completion, str | Mapping):
        return completion
    assert isinstance(completion, Sequence), "checked when the file was read"
    return [turn for turn in completion if isinstance(turn, str) or turn.get("role", "assistant") == "assistant"]
