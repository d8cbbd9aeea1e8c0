"""A number gets the same bits wherever it stands and however many threads there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mettle.inference.engine.elementwise import gelu_tanh, log_add_exp, sigmoid, silu
from mettle.inference.engine.weights import inference_threads


@pytest.mark.parametrize("threads", [2, 3, 5, 7])
@pytest.mark.parametrize(("length", "num_rows"), [(256, 1001), (100, 700), (12_000, 7)])
@pytest.mark.parametrize("function", [silu, gelu_tanh])
def test_rows_have_the_bits_that_they_have_alone(
    function: Callable[[Tensor], Tensor], length: int, num_rows: int, threads: int
) -> None:
    rows = torch.randn(num_rows, 2 * length, generator=torch.Generator().manual_seed(0))[:, :length]
    with inference_threads(1):
        alone = torch.cat([function(row) for row in rows.split(1)])
        expected = function(rows)
    with inference_threads(threads):
        together = function(rows)
    assert torch.equal(together, expected)
    if length % 32 == 0:  # of other lengths, one row by itself lies otherwise in memory
        assert torch.equal(together, alone)


@pytest.mark.parametrize("threads", [2, 3, 5, 7])
def test_numbers_side_by_side_have_the_bits_that_one_thread_gives_them(threads: int) -> None:
    numbers, others = torch.randn(2, 3, 33_000, 2, generator=torch.Generator().manual_seed(0)).mul_(9).unbind()
    with inference_threads(1):
        expected = sigmoid(numbers), log_add_exp(numbers, others)
    with inference_threads(threads):
        assert torch.equal(sigmoid(numbers), expected[0])
        assert torch.equal(log_add_exp(numbers, others), expected[1])
    torch.testing.assert_close(expected[0], 1 / (1 + torch.exp(-numbers)))
    torch.testing.assert_close(expected[1], torch.log(numbers.double().exp() + others.double().exp()).float())
