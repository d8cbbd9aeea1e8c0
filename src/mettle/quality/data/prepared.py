"""Rows of any dataset as rows of an environment: `question`, `answer`, `info`, and a split that leaks nothing.

Parts: `PreparedRows`, `prepare_rows`. Invariants: a question is in one split only, and once; a row that cannot be used
is counted with its reason, never dropped in silence.
"""

from __future__ import annotations

import ast
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mettle.envs.parsers.answers import extract_boxed_answer
from mettle.errors import UserError
from mettle.quality.data.columns import Roles, answer_text, as_text
from mettle.quality.data.formats import AnswerFormat, choice_index, choices_of
from mettle.records.messages import content_text

EVAL_SHARE = 10
"""One question in so many is held out, where the data has no evaluation split."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class _Unusable(Exception):
    """Why a row cannot be used."""


@dataclass(slots=True)
class PreparedRows:
    """The rows, each with its `split`; how many were left out, by reason."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def prepare_rows(
    splits: Mapping[str, Sequence[Mapping[str, Any]]], roles: Roles, answer_format: AnswerFormat
) -> PreparedRows:
    """Rows of an environment.

    Raises: UserError when no row can be used.
    """
    prepared = PreparedRows()
    seen: set[str] = set()
    has_eval = len(splits) > 1
    for split in sorted(splits, key=lambda name: name == "train"):  # evaluation first: it keeps what is in both
        for row in splits[split]:
            try:
                made = _prepare(row, roles, answer_format.name)
            except _Unusable as error:
                prepared.left_out[str(error)] += 1
                continue
            key = " ".join(made["question"].casefold().split())
            if key in seen:
                prepared.left_out["its question is there already"] += 1
                continue
            seen.add(key)
            is_eval = split != "train" if has_eval else zlib.crc32(key.encode()) % EVAL_SHARE == 0
            prepared.rows.append({"split": "eval" if is_eval else "train", **made})
    if not prepared.rows:
        reasons = "; ".join(f"{num} rows: {reason}" for reason, num in prepared.left_out.most_common(3))
        raise UserError(f"no row can be used: {reasons or 'there are none'}")
    if len({row["split"] for row in prepared.rows}) == 1:
        _hold_out(prepared.rows)
    return prepared


def _hold_out(rows: list[dict[str, Any]]) -> None:
    """Too few rows for the checksum to part them: every tenth, and the first, are held out."""
    for at, row in enumerate(rows):
        row["split"] = "eval" if at % EVAL_SHARE == 0 and len(rows) > 1 else "train"


def _prepare(row: Mapping[str, Any], roles: Roles, name: str) -> dict[str, Any]:
    question = _question(row, roles)
    if not question.strip():
        raise _Unusable("it has no question")
    answer = answer_text(row.get(roles.answer)).strip() if roles.answer else ""
    if name == "code":
        return {"question": question, "answer": answer, "info": {"tests": list(_tests(row, roles))}}
    if not answer:
        raise _Unusable("it has no answer")
    if name == "gsm8k":
        answer = answer.rpartition("####")[2].strip().replace(",", "")
    elif name == "boxed":
        answer = extract_boxed_answer(answer, strict=True).strip()
    elif name == "multiple-choice":
        return _choice(row, roles, question, answer)
    if not answer:
        raise _Unusable("its answer has another format")
    return {"question": question, "answer": answer}


def _question(row: Mapping[str, Any], roles: Roles) -> str:
    if roles.messages is not None:
        said = [m for m in row.get(roles.messages) or [] if m.get("role") == "user"]
        return content_text(said[-1].get("content")) if said else ""
    return as_text(row.get(roles.question)) if roles.question else ""


def _choice(row: Mapping[str, Any], roles: Roles, question: str, answer: str) -> dict[str, Any]:
    choices, index = choices_of(row, roles), choice_index(row, answer, roles)
    if index is None:
        raise _Unusable("its answer names none of its choices")
    if choices[0] not in question:
        lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
        question = "\n".join([question, *lines])
    return {"question": question, "answer": LETTERS[index], "info": {"choices": choices}}


def _tests(row: Mapping[str, Any], roles: Roles) -> Iterator[dict[str, Any]]:
    """Tests for the sandbox: of input and output, or of `assert f(...) == value`."""
    value = row.get(roles.tests) if roles.tests else None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = value.splitlines()
    found = list(_stdio_tests(value)) or list(_call_tests(value if isinstance(value, list) else []))
    if not found:
        raise _Unusable("its tests are neither input and output nor `assert f(...) == value`")
    yield from found


def _stdio_tests(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, Mapping):
        inputs, outputs = value.get("inputs") or value.get("input"), value.get("outputs") or value.get("output")
        if isinstance(inputs, list) and isinstance(outputs, list):
            yield from ({"stdin": as_text(i), "expected": as_text(o)} for i, o in zip(inputs, outputs, strict=False))
        return
    for test in value if isinstance(value, list) else []:
        if isinstance(test, Mapping):
            given = next((test[key] for key in ("stdin", "input", "in") if key in test), None)
            expected = next(
                (test[key] for key in ("expected", "output", "expected_output", "out", "stdout") if key in test), None
            )
            if given is not None and expected is not None:
                yield {"stdin": as_text(given), "expected": as_text(expected)}


def _call_tests(lines: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            statements = ast.parse(str(line).strip()).body
        except SyntaxError:
            continue
        for statement in statements:
            test = _call_test(statement)
            if test is not None:
                yield test


def _call_test(statement: ast.stmt) -> dict[str, Any] | None:
    """`assert f(1, 2) == 3`; values that JSON can keep."""
    compare = statement.test if isinstance(statement, ast.Assert) else None
    if not isinstance(compare, ast.Compare) or len(compare.ops) != 1 or not isinstance(compare.ops[0], ast.Eq):
        return None
    call = compare.left
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        return None
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        expected = ast.literal_eval(compare.comparators[0])
        test = {"function": call.func.id, "args": args, "expected": expected}
        return test if json.loads(json.dumps(test)) == test else None
    except (ValueError, TypeError):
        return None
