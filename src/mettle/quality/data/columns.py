"""What the columns of a dataset hold, and which of them are the question, the answer, the choices, the tests.

Parts: `DataColumn`, `describe_columns`, `Roles`, `find_roles`. Invariant: a column that some rows lack is there, with
the rest counted as null.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

QUESTIONS = ("question", "prompt", "problem", "instruction", "query", "input", "text", "sentence", "content", "source")
ANSWERS = (
    "answer", "answers", "final_answer", "target", "label", "labels", "ground_truth", "gold", "answerkey",
    "correct_answer", "expected", "output", "solution", "canonical_solution", "response", "completion", "reference",
    "reference_answer", "code",
)  # fmt: skip
CHOICES = ("choices", "options", "endings", "candidates")
TESTS = ("tests", "test_cases", "test_list", "test", "input_output", "unit_tests", "public_tests", "private_tests")
MAX_DISTINCT = 100_000


@dataclass(frozen=True, slots=True)
class DataColumn:
    """One column. Lengths are of text in characters, of lists in items; least and greatest are of numbers."""

    name: str
    types: dict[str, int]
    num_null: int
    num_distinct: int
    lengths: tuple[int, float, int] | None = None
    range: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON wants it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Roles:
    """The columns that matter; None where there is none such."""

    question: str | None = None
    answer: str | None = None
    choices: str | None = None
    tests: str | None = None
    messages: str | None = None


def describe_columns(rows: Sequence[Mapping[str, Any]]) -> list[DataColumn]:
    """Every column, in the order of appearance."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [_describe(name, [row.get(name) for row in rows]) for name in names]


def find_roles(rows: Sequence[Mapping[str, Any]], *, question: str | None = None, answer: str | None = None) -> Roles:
    """Which column is what, by name; those that a person names are taken as they are."""
    names = list(dict.fromkeys(str(name) for row in rows[:100] for name in row))
    by_lower = {name.lower(): name for name in names}

    def first(wanted: Sequence[str], taken: Sequence[str | None] = ()) -> str | None:
        return next((by_lower[name] for name in wanted if name in by_lower and by_lower[name] not in taken), None)

    messages = next(
        (n for n in names if n.lower() in ("messages", "conversations", "prompt") and _is_chat(rows, n)), None
    )
    question = question or first(QUESTIONS)
    tests = first(TESTS, (question,))
    answer = answer or first(ANSWERS, (question, tests))
    return Roles(question, answer, first(CHOICES, (question, answer)), tests, messages)


def as_text(value: Any) -> str:
    """A cell as a person would write it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def answer_text(value: Any) -> str:
    """An answer as text; of reading comprehension's `{"text": [...], ...}` and of lists of texts, the first."""
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        value = value["text"]
    if isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        value = value[0]
    return as_text(value)


def _is_chat(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    value = rows[0].get(name) if rows else None
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


def _describe(name: str, values: Sequence[Any]) -> DataColumn:
    present = [value for value in values if value is not None]
    types = Counter(_type(value) for value in present)
    distinct = {as_text(value) for value in present[:MAX_DISTINCT]}
    sizes = [len(value) for value in present if isinstance(value, str | list | tuple)]
    numbers = [float(value) for value in present if isinstance(value, int | float) and not isinstance(value, bool)]
    return DataColumn(
        name=str(name),
        types=dict(types.most_common()),
        num_null=len(values) - len(present),
        num_distinct=len(distinct),
        lengths=(min(sizes), sum(sizes) / len(sizes), max(sizes)) if sizes else None,
        range=(min(numbers), max(numbers)) if numbers else None,
    )


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return type(value).__name__
    if isinstance(value, Mapping):
        return f"object({', '.join(list(map(str, value))[:6])})"
    if isinstance(value, list | tuple):
        return f"list of {_type(value[0])}" if value else "list"
    return type(value).__name__
