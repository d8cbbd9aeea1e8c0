"""A block gives back what was written: turns, and credit in every grain that it can have."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw, Turn
from mettle.records.tokens import CREDIT_COLUMNS
from mettle.storage.shards import decode_group, encode_group

number = st.floats(-3, 3, width=32)
array = st.lists(number, min_size=1, max_size=4).map(lambda values: np.array(values, np.float32))


@st.composite
def rollouts(draw, name):
    turns = tuple(
        Turn(
            0, np.arange(draw(st.integers(0, 3)), dtype=np.int32), np.arange(n, dtype=np.int32),
            np.full(n, -0.5, np.float32), np.full(n, 2, np.int32), 0.7, draw(st.none() | number), draw(st.none() | number),
            replica=draw(st.sampled_from(["", "inference-1", "10.0.0.7:8000"])),
        )
        for n in draw(st.lists(st.integers(0, 3), max_size=3))
    )  # fmt: skip
    value = number | st.tuples(*(number | array for _ in turns))
    credit = draw(st.none() | st.dictionaries(st.sampled_from(CREDIT_COLUMNS), value))
    return RolloutRecord(name, draw(st.none() | number), {"m": 1.0}, [], turns, credit=credit)


@given(st.data())
def test_a_group_comes_back_with_its_turns_and_its_credit(data):
    members = tuple(data.draw(rollouts(f"r{i}")) for i in range(data.draw(st.integers(1, 3))))
    back = decode_group(encode_group(GroupRecord(TaskDraw(1, "e", "u", 0, 3), 4, members)))
    assert (back.draw, back.version_at_start) == (TaskDraw(1, "e", "u", 0, 3), 4)
    for found, written in zip(back.rollouts, members, strict=True):
        assert (found.rollout_id, found.reward, found.metrics) == (written.rollout_id, written.reward, written.metrics)
        np.testing.assert_equal(_plain(found.credit), _plain(written.credit))
        for turn, expected in zip(found.turns, written.turns, strict=True):
            for name in Turn.__slots__:
                np.testing.assert_equal(getattr(turn, name), getattr(expected, name))


def _plain(credit):
    """Arrays as lists, so that whatever holds them is told apart from a number."""
    if credit is None:
        return None
    return {
        name: value if isinstance(value, float) else [np.asarray(part).tolist() for part in value]
        for name, value in credit.items()
    }
