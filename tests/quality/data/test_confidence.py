"""How often the answer format is right, and whether its confidence says so, on labelled columns of answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mettle.quality.data import confidence
from mettle.quality.data.columns import find_roles
from mettle.quality.data.confidence import MEASURED, bin_of, confidence_of
from mettle.quality.data.formats import FORMATS, detect_format
from mettle.quality.data.recipes import recipe_for

LABELLED = [json.loads(line) for line in Path(__file__).with_name("labelled_answers.jsonl").open()]
FIRST_ROWS = 4
FITTED, HELD_OUT = LABELLED[::2], LABELLED[1::2]


def detected(column, num_rows=None):
    question = column.get("question", "q")
    rows = [{"question": f"{question} {n}", "answer": answer} for n, answer in enumerate(column["answers"][:num_rows])]
    if column["format"] == "multiple-choice":
        rows = [{**row, "question": question} for row in rows]
    return detect_format(rows, find_roles(rows))


def calls(columns):
    """(right or not, confidence) of each column, read whole and cut short."""
    for column in columns:
        for num_rows in (None, FIRST_ROWS):
            found = detected(column, num_rows)
            yield found.name == column["format"], found.confidence


def test_the_table_of_confidence_is_what_the_fitted_half_counts(monkeypatch):
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    bins: list[str] = []
    monkeypatch.setattr(
        "mettle.quality.data.formats.confidence_of", lambda *call: bins.append(bin_of(*call)) or confidence_of(*call)
    )
    for is_right, _ in calls(FITTED):
        total[bins[-1]] += 1
        right[bins[-1]] += is_right
    assert {name: (right[name], num) for name, num in sorted(total.items())} == MEASURED


def test_the_columns_that_had_no_part_in_it_are_called_right_as_often_as_is_said():
    found = list(calls(HELD_OUT))
    accuracy = sum(is_right for is_right, _ in found) / len(found)
    said = sum(sure for _, sure in found) / len(found)
    assert len(found) >= 70
    assert accuracy >= 0.9
    assert abs(accuracy - said) <= 0.1, f"right {accuracy:.3f} of the time, said {said:.3f}"


def test_a_call_that_was_wrong_was_less_sure():
    wrong = [sure for is_right, sure in calls(LABELLED) if not is_right]
    right = [sure for is_right, sure in calls(LABELLED) if is_right]
    assert sum(wrong) / len(wrong) < sum(right) / len(right) - 0.05


def test_short_answers_are_never_paid_by_shared_words():
    short = [column for column in LABELLED if column["format"] != "free-text"]
    for column in short:
        for num_rows in (None, FIRST_ROWS):
            assert "Counter" not in recipe_for(detected(column, num_rows)).functions, column["name"]


def test_the_set_has_every_format_but_code_and_nothing_is_certain():
    assert {column["format"] for column in LABELLED} == set(FORMATS) - {"code"}
    assert all(
        0.0 < confidence_of(name, share, num) < 1.0 for name in FORMATS for share in (0.8, 1.0) for num in (1, 99)
    )
    assert confidence.confidence_of("free-text", 0.5, 30) == pytest.approx(0.5), "never seen, so nobody knows"
