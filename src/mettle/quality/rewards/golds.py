"""The right answers that a row states, and wrong ones made from them.

Parts: `gold_values`, `Gold`, `wrong_answers`; `same`, `differ_in_case`, `asks_for_order`. Invariant: a wrong answer
differs from the right one by more than space, the way a number or a date is written, and case, where case says nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mettle.envs.parsers.answers import extract_boxed_answer, extract_hash_answer
from mettle.quality.answer_values import as_date, as_time
from mettle.quality.rewards.near_misses import is_number, near_misses, number_of

ANSWER_KEYS = (
    "answer", "solution", "target", "gold", "expected", "ground_truth", "label", "reference", "canonical_solution",
)  # fmt: skip
"""Columns, of the row or of its `info`, that may state the right answer."""

OPPOSITES = {
    "yes": "no", "true": "false", "correct": "incorrect", "positive": "negative", "1": "0",
    "entailment": "contradiction",
    "valid": "invalid", "agree": "disagree", "safe": "unsafe", "spam": "ham", "male": "female", "up": "down",
}  # fmt: skip
OPPOSITES.update({value: key for key, value in list(OPPOSITES.items())})
_ORDER = re.compile(
    r"\b(order(ed|ing)?|sort(ed)?|rank(ed|ing)?|sequence|chronolog\w+|ascending|descending|alphabetical(ly)?|revers\w+"
    r"|(oldest|largest|smallest|highest|lowest|shortest|longest|earliest|first) to|step by step|steps|path|route)\b",
    re.IGNORECASE,
)
MAX_LABELS = 20
MAX_NEGATED_WORDS = 5


@dataclass(frozen=True, slots=True)
class Gold:
    """The right answer of one row, among those of the others."""

    value: str
    others: tuple[str, ...]
    labels: tuple[str, ...]
    """All the answers there are, where they are few and come again; else empty."""
    is_ordered: bool = False
    """The question asks for an order."""


def gold_values(row: Mapping[str, Any]) -> list[str]:
    """What the row may mean by its right answer, likeliest first; empty when it states none."""
    info = row.get("info")
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except ValueError:
            info = None
    sources = [row, *([info] if isinstance(info, Mapping) else [])]
    found: dict[str, None] = {}
    for source in sources:
        for key in ANSWER_KEYS:
            text = _as_text(source.get(key))
            if text.strip():
                found.update(dict.fromkeys(_readings(text)))
    return list(found)


def labels_of(golds: Sequence[str]) -> tuple[str, ...]:
    """The answers, most frequent first, where they are few and come again: choices, classes, yes and no."""
    counts = Counter(gold.strip() for gold in golds if gold.strip())
    if not 2 <= len(counts) <= MAX_LABELS or len(golds) < 2 * len(counts) or any(len(label) > 60 for label in counts):
        return ()
    return tuple(label for label, _ in counts.most_common())


def wrong_answers(gold: Gold) -> dict[str, str]:
    """Wrong answers by kind."""
    has_case = differ_in_case([gold.value, *gold.others])
    close = near_misses(gold.value, is_label=gold.value in gold.labels, is_ordered=gold.is_ordered, has_case=has_case)
    made = {
        "other-row": next((other for other in gold.others if not same(other, gold.value)), None),
        **close,
        "negation": _negation(gold),
        "other-choice": next((label for label in gold.labels if not same(label, gold.value)), None) or _letter(gold),
    }
    return {
        kind: text
        for kind, text in made.items()
        if text is not None and (kind == "other-case" or not same(text, gold.value))
    }


def same(one: str, other: str) -> bool:
    """Whether two answers differ by nothing but case, space, punctuation at the end or the way a number is written."""
    if _folded(one) == _folded(other):
        return True
    if is_number(one) and is_number(other):
        return abs(number_of(one) - number_of(other)) < 1e-9
    return any((value := read(one)) is not None and value == read(other) for read in (as_date, as_time))


def differ_in_case(answers: Sequence[str]) -> bool:
    """Whether two answers differ in nothing but case, so that case is part of an answer."""
    known = {answer.strip() for answer in answers}
    return len({answer.casefold() for answer in known}) < len(known)


def asks_for_order(question: str) -> bool:
    """Whether a question wants things in an order."""
    return _ORDER.search(question) is not None


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Sequence) and value:
        return _as_text(value[0])
    return str(value)


def _readings(text: str) -> Iterator[str]:
    if "####" in text:
        yield extract_hash_answer(text)
    if "\\boxed{" in text:
        yield extract_boxed_answer(text, strict=True)
    yield text.strip()


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".!")


def _negation(gold: Gold) -> str | None:
    """The opposite; of a number only where some answers are negative, because only there does the sign say anything."""
    stripped = gold.value.strip()
    opposite = OPPOSITES.get(stripped.lower())
    if opposite is not None:
        return opposite.capitalize() if stripped[:1].isupper() else opposite
    if is_number(stripped):
        if not any(other.strip().startswith("-") for other in (stripped, *gold.others)):
            return None
        return stripped.lstrip("+-") if stripped.startswith("-") else f"-{stripped.lstrip('+')}"
    words = stripped.split()
    if 1 <= len(words) <= MAX_NEGATED_WORDS and "\n" not in stripped and len(stripped) > 2 and words[0].isalpha():
        return f"not {stripped}"
    return None


def _letter(gold: Gold) -> str | None:
    """Another letter, for a choice whose labels are not known."""
    value = gold.value.strip()
    if len(value) == 1 and value.upper() in "ABCDE":
        other = "ABCDE"[("ABCDE".index(value.upper()) + 1) % 5]
        return other if value.isupper() else other.lower()
    return None
