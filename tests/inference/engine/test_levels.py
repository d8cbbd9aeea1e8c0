"""Levels cover what a position sees, each key once; and are not used where the kernel does not keep the bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mettle.inference.engine import levels
from mettle.inference.engine.levels import ROWS, TILE, keeps_bits


@given(st.integers(0, 40), st.integers(1, 80))
def test_what_a_position_sees_is_its_own_tile_and_one_block_of_each_level(first: int, count: int) -> None:
    start, end = first * ROWS, (first + count) * ROWS
    seen = {position: position % TILE for position in range(start, end)}
    for size, at, stop, num_blocks in levels._level_parts(start, end):
        assert stop - at == (2 * num_blocks - 1) * size or num_blocks == 1
        for block in range(num_blocks):
            own = range(at + 2 * block * size, stop if num_blocks == 1 else at + (2 * block + 1) * size)
            assert own[0] // size == own[-1] // size
            assert own[0] // size % 2 == 1, "every other block reads the one before it"
            for position in own:
                seen[position] += size
    assert all(count == position for position, count in seen.items())


@pytest.fixture
def tried_anew() -> Iterator[None]:
    keeps_bits.cache_clear()
    yield
    keeps_bits.cache_clear()


@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize("odd_rows", [32, 96, 800])
def test_a_kernel_whose_bits_hang_on_the_number_of_rows_is_not_used(
    odd_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = levels._attend

    def uneven(query: torch.Tensor, *rest: torch.Tensor, **more: bool) -> tuple[torch.Tensor, torch.Tensor]:
        found, sums = attend(query, *rest, **more)
        return (found + 1e-6 if query.shape[2] == odd_rows else found), sums

    assert keeps_bits(32, torch.float32, 1)
    keeps_bits.cache_clear()
    monkeypatch.setattr(levels, "_attend", uneven)
    assert not keeps_bits(32, torch.float32, 1)
