"""What kind of answer a dataset has, with how sure that is and why.

Parts: `AnswerFormat`, `detect_format`, `FORMATS`. Invariant: the first format in the order below that nearly all
answers have is taken; free text takes what is left, and says so with little confidence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mettle.quality.data.columns import Roles, answer_text, as_text
from mettle.quality.rewards.golds import is_number, labels_of

FORMATS = (
    "code", "gsm8k", "boxed", "multiple-choice", "boolean", "numeric", "json", "label", "free-text",
)  # fmt: skip
NUM_SAMPLED = 500
NEEDED_SHARE = 0.8
BOOLEANS = frozenset({"yes", "no", "true", "false", "y", "n"})
CHOICE_LINE = re.compile(r"^[ \t]*\(?([A-J])[).:]\s+(?=\S)", re.MULTILINE)
CHOICE_KEY = re.compile(r"\(?([A-Ja-j]|[0-9])\)?")
MAX_LABEL_CHARS = 40


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """`confidence`: the share of answers that have the format. `evidence`: sentences with the counts."""

    name: str
    confidence: float
    evidence: tuple[str, ...]
    labels: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON wants it."""
        return asdict(self)


def detect_format(rows: Sequence[Mapping[str, Any]], roles: Roles) -> AnswerFormat | None:
    """The format of the answers; None when no column holds answers or tests."""
    sample = list(rows[:NUM_SAMPLED])
    if roles.tests is not None:
        num = sum(bool(row.get(roles.tests)) for row in sample)
        if num >= NEEDED_SHARE * len(sample):
            evidence = (f"{num} of {len(sample)} rows have tests in `{roles.tests}`",)
            return AnswerFormat("code", num / len(sample), evidence)
    if roles.answer is None:
        return None
    answers = [answer_text(row.get(roles.answer)).strip() for row in sample]
    present = [(row, answer) for row, answer in zip(sample, answers, strict=True) if answer]
    if not present:
        return None
    shares = {
        name: _share(name, present, roles)
        for name in ("gsm8k", "boxed", "multiple-choice", "boolean", "numeric", "json")
    }
    labels = labels_of([answer for _, answer in present])
    for name, (num, why) in shares.items():
        if num >= NEEDED_SHARE * len(present):
            return AnswerFormat(name, num / len(present), (f"{num} of {len(present)} answers {why}",), labels)
    if labels and max(map(len, labels)) <= MAX_LABEL_CHARS:
        shown = ", ".join(labels[:6])
        return AnswerFormat("label", 1.0, (f"{len(present)} answers are {len(labels)} labels: {shown}",), labels)
    return _free_text(present, shares)


def _share(name: str, present: Sequence[tuple[Mapping[str, Any], str]], roles: Roles) -> tuple[int, str]:
    tests: dict[str, tuple[Callable[[Mapping[str, Any], str], bool], str]] = {
        "gsm8k": (lambda _, answer: "####" in answer, "end in `#### ` and a result"),
        "boxed": (lambda _, answer: "\\boxed{" in answer, "hold a \\boxed{} result"),
        "multiple-choice": (lambda row, answer: _is_choice(row, answer, roles), "name one of the choices of their row"),
        "boolean": (lambda _, answer: answer.lower() in BOOLEANS, "are yes or no, true or false"),
        "numeric": (lambda _, answer: is_number(answer), "are one number"),
        "json": (lambda _, answer: _is_json(answer), "are JSON objects or lists"),
    }
    test, why = tests[name]
    return sum(bool(test(row, answer)) for row, answer in present), why


def choices_of(row: Mapping[str, Any], roles: Roles) -> list[str]:
    """The choices of a row: of its column, or the lines `A) ...` of its question, without their letters."""
    value = row.get(roles.choices) if roles.choices else None
    info = row.get("info")
    if value is None and isinstance(info, Mapping):
        value = info.get("choices")
    if isinstance(value, Mapping):
        value = value.get("text") or list(value.values())
    if isinstance(value, list | tuple) and len(value) > 1:
        return [as_text(each) for each in value]
    question = as_text(row.get(roles.question)) if roles.question else ""
    letters = CHOICE_LINE.findall(question)
    if len(letters) > 1 and letters == [chr(ord("A") + at) for at in range(len(letters))]:
        lines = CHOICE_LINE.split(question)[2::2]
        return [line.strip() for line in lines]
    return []


def choice_index(row: Mapping[str, Any], answer: str, roles: Roles) -> int | None:
    """Which choice the answer names: by letter, by number from 0, or by its text."""
    choices = choices_of(row, roles)
    if not choices:
        return None
    folded = [choice.casefold().strip() for choice in choices]
    if answer.casefold().strip() in folded:
        return folded.index(answer.casefold().strip())
    match = CHOICE_KEY.fullmatch(answer.strip().rstrip(".:"))
    if match is None:
        return None
    key = match[1]
    labels = row.get(roles.choices) if roles.choices else None
    if isinstance(labels, Mapping) and isinstance(labels.get("label"), list) and key in labels["label"]:
        return int(labels["label"].index(key))
    index = int(key) if key.isdigit() else ord(key.upper()) - ord("A")
    return index if index < len(choices) else None


def _is_choice(row: Mapping[str, Any], answer: str, roles: Roles) -> bool:
    return choice_index(row, answer, roles) is not None


def _is_json(answer: str) -> bool:
    if not answer.startswith(("{", "[")):
        return False
    try:
        json.loads(answer)
    except ValueError:
        return False
    return True


def _free_text(present: Sequence[tuple[Mapping[str, Any], str]], shares: Mapping[str, tuple[int, str]]) -> AnswerFormat:
    words = sorted(len(answer.split()) for _, answer in present)
    best, (num, why) = max(shares.items(), key=lambda item: item[1][0])
    evidence = [f"answers have {words[len(words) // 2]} words at the median"]
    if num:
        evidence.append(f"{num} of {len(present)} {why} ({best}), which is too few")
    return AnswerFormat("free-text", 1.0 - num / len(present), tuple(evidence))
