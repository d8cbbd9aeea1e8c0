"""Rows as lines: valid JSON whatever an environment put into them, and the identity of a task."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.evals.output import json_line, task_key_of
from mettle.records.messages import messages_from


class Odd:
    def __str__(self):
        return "odd"


loop: dict = {}
loop["itself"] = [loop]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("half \ud800 a pair", "half \ud800 a pair"),
        (float("nan"), None),
        ({"deep": [1.0, float("inf")]}, {"deep": [1.0, None]}),
        (Odd(), "odd"),
        ({1: (2, 3)}, {"1": [2, 3]}),
        (loop, {"itself": ["<dict>"]}),
        ({"set": {1}}, {"set": "{1}"}),
        ("line\nbreak\u2028and\x00nul", "line\nbreak\u2028and\x00nul"),
        ("x" * 10_000_000, "x" * 10_000_000),
    ],
    ids=["surrogate", "nan", "infinity", "object", "key", "loop", "set", "controls", "10 MB"],
)
def test_whatever_a_row_holds_it_is_one_line_of_valid_json(value, expected):
    line = json_line({"example_id": 0, "value": value}).encode()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(line.decode("utf-8"), parse_constant=refuse)["value"] == expected


@given(st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False, allow_infinity=False) | st.none()))
def test_a_row_reads_back_as_it_was(row):
    assert json.loads(json_line(row)) == row


def test_a_task_key_is_the_same_in_another_process():
    row = {
        "prompt": messages_from([{"role": "user", "content": "q\u00e9"}]),
        "answer": "1",
        "info": {"b": Odd(), "a": 1},
    }
    code = (
        "from mettle.evals.output import task_key_of\n"
        "class Odd: pass\n"
        "row = {'prompt': [{'role': 'user', 'content': 'q\\u00e9'}], 'answer': '1', 'info': {'a': 1, 'b': Odd()}}\n"
        "print(task_key_of(row))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert task_key_of(row) == other
    assert len(other) == 16


@pytest.mark.parametrize("change", [{"answer": "2"}, {"prompt": "other"}, {"info": {"level": 2}}])
def test_another_task_has_another_key(change):
    row = {"prompt": "question", "answer": "1", "info": {"level": 1}, "example_id": 4}
    assert task_key_of({**row, **change}) != task_key_of(row)
    assert task_key_of({**row, "example_id": 5}) == task_key_of(row)
