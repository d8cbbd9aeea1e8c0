"""What is made after the holes are filled lies side by side, however the memory before was left."""

from __future__ import annotations

import itertools
import sys

import pytest

from mettle.sandbox.zygote.ballast import fill_holes


@pytest.mark.parametrize("num_bytes", [48, 112, 256, 512])
def test_what_is_made_behind_the_ballast_lies_side_by_side(num_bytes: int) -> None:
    made = make(3000, num_bytes)
    del made[::2]  # 1,500 holes
    assert share_of_neighbours(make(1000, num_bytes), num_bytes) < 0.7
    ballast = fill_holes()
    assert share_of_neighbours(make(1000, num_bytes), num_bytes) > 0.9
    assert sum(map(sys.getsizeof, ballast)) < 32 << 20, "its whole amount is bounded"


def make(count: int, num_bytes: int) -> list[bytes]:
    return [bytes(num_bytes - sys.getsizeof(b"")) for _ in range(count)]


def share_of_neighbours(pieces: list[bytes], num_bytes: int) -> float:
    are_so = [after - before == num_bytes for before, after in itertools.pairwise(map(id, pieces))]
    return sum(are_so) / len(are_so)
