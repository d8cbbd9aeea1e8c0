"""What is made after the holes are filled lies side by side, however the memory before was left."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from mettle.sandbox.zygote.ballast import fill_holes

SIZES = (48, 112, 256, 512)


@pytest.fixture(scope="module")
def found() -> Mapping[str, float]:
    """Of an interpreter of its own, as the template's is: this one's memory is what all tests before have left."""
    command = [sys.executable, "-c", f"from {__name__} import look; look()"]
    done = subprocess.run(command, stdout=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}, check=True)
    told: dict[str, float] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("num_bytes", SIZES)
def test_what_is_made_behind_the_ballast_lies_side_by_side(found: Mapping[str, float], num_bytes: int) -> None:
    assert found[f"{num_bytes} before"] < 0.7
    assert found[f"{num_bytes} behind"] > 0.9


def test_its_whole_amount_is_bounded(found: Mapping[str, float]) -> None:
    assert found["ballast"] < 32 << 20


def look() -> None:
    """Print the shares of neighbours, and the bytes of the ballast."""
    told: dict[str, float] = {}
    left = []
    for num_bytes in SIZES:
        made = make(3000, num_bytes)
        left.append(made[::2])
        del made  # 1,500 holes
        told[f"{num_bytes} before"] = share_of_neighbours(make(1000, num_bytes), num_bytes)
    ballast = fill_holes()
    for num_bytes in SIZES:
        told[f"{num_bytes} behind"] = share_of_neighbours(make(1000, num_bytes), num_bytes)
    told["ballast"] = sum(map(sys.getsizeof, ballast))
    print(json.dumps(told))


def make(count: int, num_bytes: int) -> list[bytes]:
    return [bytes(num_bytes - sys.getsizeof(b"")) for _ in range(count)]


def share_of_neighbours(pieces: list[bytes], num_bytes: int) -> float:
    are_so = [after - before == num_bytes for before, after in itertools.pairwise(map(id, pieces))]
    return sum(are_so) / len(are_so)
