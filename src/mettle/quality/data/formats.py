"""What kind of answer a dataset has, with how sure that is and why.

Parts: `AnswerFormat`, `detect_format`, `FORMATS`. Invariants: the first format in the order below that nearly all
answers have is taken, and free text takes what is left; how sure that is was measured (`confidence`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mettle.quality.answer_values import as_date, as_items, as_roman, as_time, as_version, as_words
from mettle.quality.data.columns import Roles, answer_text, as_text
from mettle.quality.data.confidence import confidence_of
from mettle.quality.rewards.golds import asks_for_order, differ_in_case, labels_of
from mettle.quality.rewards.near_misses import is_number

FORMATS = (
    "code", "gsm8k", "boxed", "multiple-choice", "boolean", "date", "time", "version", "roman", "numeric", "json",
    "label", "list", "short", "free-text",
)  # fmt: skip
NUM_SAMPLED = 500
NEEDED_SHARE = 0.8
BOOLEANS = frozenset({"yes", "no", "true", "false", "y", "n"})
CHOICE_LINE = re.compile(r"^[ \t]*\(?([A-J])[).:]\s+(?=\S)", re.MULTILINE)
CHOICE_KEY = re.compile(r"\(?([A-Ja-j]|[0-9])\)?")
MAX_LABEL_CHARS = 40
MAX_SHORT_WORDS = 4
MAX_ITEM_WORDS = 4
"""A list of longer items is prose with commas."""
Row = Mapping[str, Any]
Present = Sequence[tuple[Row, str]]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """`confidence`: how often a call as clear as this one was right on labelled columns. `evidence`: the counts.

    `has_case`: two answers differ in nothing but case, so case is part of the answer.
    """

    name: str
    confidence: float
    evidence: tuple[str, ...]
    labels: tuple[str, ...] = ()
    has_case: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As JSON wants it."""
        return asdict(self)


def detect_format(rows: Sequence[Row], roles: Roles) -> AnswerFormat | None:
    """The format of the answers; None when no column holds answers or tests."""
    sample = list(rows[:NUM_SAMPLED])
    if roles.tests is not None:
        num = sum(bool(row.get(roles.tests)) for row in sample)
        if num >= NEEDED_SHARE * len(sample):
            evidence = (f"{num} of {len(sample)} rows have tests in `{roles.tests}`",)
            return AnswerFormat("code", confidence_of("code", num / len(sample), len(sample)), evidence)
    if roles.answer is None:
        return None
    answers = [answer_text(row.get(roles.answer)).strip() for row in sample]
    present = [(row, answer) for row, answer in zip(sample, answers, strict=True) if answer]
    return _of_answers(present, roles) if present else None


def _of_answers(present: Present, roles: Roles) -> AnswerFormat:
    texts = [answer for _, answer in present]
    labels, has_case = labels_of(texts), differ_in_case(texts)
    if labels and max(map(len, labels)) > MAX_LABEL_CHARS:
        labels = ()
    counts: dict[str, tuple[int, str]] = {}
    for name, (test, why) in _tests(present, roles).items():
        if name == "label":
            num = len(present) if labels else 0
            why = f"are {len(labels)} labels: {', '.join(labels[:6])}"
        else:
            num = sum(bool(test(row, answer)) for row, answer in present)
        counts[name] = num, why
        share = num / len(present)
        if share >= NEEDED_SHARE and (name != "version" or _are_versions(texts)):
            told = [f"{num} of {len(present)} answers {why}"]
            if name == "list" and not _are_ordered(present, roles):
                told.append("no question asks for an order; they are compared in order")
            if has_case:
                told.append("some differ in nothing but case, so case counts")
            return AnswerFormat(name, confidence_of(name, share, len(present)), tuple(told), labels, has_case)
    return _free_text(present, counts)


def _tests(present: Present, roles: Roles) -> dict[str, tuple[Callable[[Row, str], bool], str]]:
    is_ordered = _are_ordered(present, roles)
    return {
        "gsm8k": (lambda _, answer: "####" in answer, "end in `#### ` and a result"),
        "boxed": (lambda _, answer: "\\boxed{" in answer, "hold a \\boxed{} result"),
        "multiple-choice": (lambda row, answer: _is_choice(row, answer, roles), "name one of the choices of their row"),
        "boolean": (lambda _, answer: answer.lower() in BOOLEANS, "are yes or no, true or false"),
        "date": (lambda _, answer: as_date(answer) is not None, "are one date"),
        "time": (lambda _, answer: as_time(answer) is not None, "are one time of day"),
        "version": (lambda _, answer: as_version(answer) is not None, "are one version"),
        "roman": (lambda _, answer: answer.isupper() and as_roman(answer) is not None, "are one Roman numeral"),
        "numeric": (lambda _, answer: is_number(answer), "are one number"),
        "json": (lambda _, answer: _is_json(answer), "are JSON objects or lists"),
        "label": (lambda _, answer: True, ""),
        "list": (lambda _, answer: _is_list(answer, is_ordered), "are lists of short items"),
        "short": (lambda _, answer: _is_short(answer), f"have at most {MAX_SHORT_WORDS} words"),
    }


def _are_versions(answers: Sequence[str]) -> bool:
    """Numbers with one point are versions only where others have two points, or a letter."""
    return sum(not is_number(answer) for answer in answers) >= 0.3 * len(answers)


def _are_ordered(present: Present, roles: Roles) -> bool:
    asked = [as_text(row.get(roles.question)) for row, _ in present[:50]] if roles.question else []
    return sum(map(asks_for_order, asked)) >= 0.5 * len(asked) > 0


def _is_list(answer: str, is_ordered: bool) -> bool:
    """Items that are parted by more than space; by space alone where an order is asked for, or all are numbers."""
    items = as_items(answer)
    if items is None or len(items) < 2 or any(len(item.split()) > MAX_ITEM_WORDS for item in items):
        return False
    if len(items) == len(answer.split()) and not any(sign in answer for sign in ",;|>\u2192\n"):
        return len(items) > 2 and (is_ordered or all(is_number(item) or len(item) == 1 for item in items))
    return is_ordered or len(items) > 2 or any(sign in answer for sign in ";|>\u2192\n")


def _is_short(answer: str) -> bool:
    return (
        len(as_words(answer).split()) <= MAX_SHORT_WORDS and "\n" not in answer and not answer.endswith((".", "?", "!"))
    )


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


def _free_text(present: Present, counts: Mapping[str, tuple[int, str]]) -> AnswerFormat:
    words = sorted(len(answer.split()) for _, answer in present)
    best, (num, why) = max(counts.items(), key=lambda item: item[1][0])
    evidence = [f"answers have {words[len(words) // 2]} words at the median"]
    if num:
        evidence.append(f"{num} of {len(present)} {why} ({best}), which is too few")
    share = 1.0 - num / len(present)
    return AnswerFormat("free-text", confidence_of("free-text", share, len(present)), tuple(evidence))
