"""What others wrote is read as text that can be written again."""

import datetime
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.storage.plain_json import json_bytes, json_text, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=8,
)


def test_half_a_surrogate_pair_is_its_escape_and_a_whole_pair_stays() -> None:
    found = read_json(b'{"\\uD800": ["a\\udfffb", "\\ud83d\\ude00"]}')
    assert found == {"\\ud800": ["a\\udfffb", "\U0001f600"]}


@given(VALUES)
def test_what_is_valid_is_read_as_it_is(value: object) -> None:
    assert read_json(json.dumps(value).encode()) == value


@given(st.lists(st.text(st.characters(categories=("Cs", "L", "P")))))
def test_whatever_was_written_can_be_written_again(texts: list[str]) -> None:
    found = read_json(json_text(texts).encode())
    assert len(found) == len(texts)
    json.dumps(found, ensure_ascii=False).encode()


@pytest.mark.parametrize("data", [b"{", b"\xff", b""])
def test_what_is_no_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(data)


@given(VALUES)
def test_both_ways_of_writing_say_the_same(value: object) -> None:
    assert read_json(json_bytes(value)) == read_json(json_text(value).encode())


class _Named:
    def __str__(self) -> str:
        return "named"


def _endless() -> list[object]:
    endless: list[object] = [1]
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"x": float("nan"), "y": float("-inf")}, {"x": None, "y": None}),
        (np.array([1.0, float("nan")]), [1.0, None]),
        ({"n": np.float32(1.5), 3: 2**70}, {"n": 1.5, "3": 2**70}),
        (["\ud800", _Named(), (1, 2)], ["\ud800", "named", [1, 2]]),
        (b"\xff", "b'\\xff'"),
        (_endless(), [1, "<list>"]),
        ({"at": datetime.date(2026, 1, 2)}, {"at": "2026-01-02"}),
    ],
)
def test_what_json_does_not_know_is_said_as_far_as_it_can_be(value: object, said: object) -> None:
    for data in (json_bytes(value), json_text(value).encode()):
        assert b"\n" not in data
        assert json.loads(data) == said
