"""Packed matrices: the products of plain ones, with the same bits for a row in any company; and what stays plain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from policies import make_model, picked_logprobs, tiny_config
from schedulers import ask, make_scheduler, sampled

from mettle.inference.engine import matrices
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.matrices import Matrix, row_steps
from mettle.inference.engine.weights import inference_threads

SHAPES = [(96, 96), (256, 128), (128, 1024), (512, 384), (1000, 96)]


@pytest.fixture
def one_thread() -> Iterator[None]:
    with inference_threads(1):
        yield


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    matrix, bias = Matrix(weight.clone()), torch.randn(shape[0]).to(dtype)
    least = 4 if matrix.is_packed else 8
    rows, residual = torch.randn(150, shape[1]).to(dtype), torch.randn(150, shape[0]).to(dtype)
    whole, added = matrix.times(rows, bias), matrix.added_to(residual, rows)
    expected = rows.double() @ weight.double().t()
    loose = 1e-4 if dtype == torch.float32 else 0.05
    assert (whole.double() - expected - bias.double()).abs().max() < loose * expected.abs().max()
    assert (added.double() - expected - residual.double()).abs().max() < loose * expected.abs().max()
    for first, stop in ((0, least), (3, 3 + least), (40, 57), (0, 96), (31, 150)):
        assert torch.equal(matrix.times(rows[first:stop].clone(), bias), whole[first:stop])
        assert torch.equal(matrix.added_to(residual[first:stop].clone(), rows[first:stop].clone()), added[first:stop])


def test_a_shape_whosepacked_products_depend_on_company_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 200)
    product = matrices.packed_product

    def uneven(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return product(rows, packed, bias) + (1e-6 if len(rows) == 24 else 0.0)

    matrices._keeps_bits.cache_clear()
    monkeypatch.setattr(matrices, "packed_product", uneven)
    matrix = Matrix(weight)
    matrices._keeps_bits.cache_clear()
    assert not matrix.is_packed
    rows = torch.randn(9, 200)
    assert torch.equal(matrix.times(rows), torch.nn.functional.linear(rows, weight))


def test_a_torch_withoutpacked_products_is_served_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Could not run 'mkldnn::_reorder_linear_weight'\nmore lines")

    matrices._keeps_bits.cache_clear()
    monkeypatch.setattr(matrices, "packed_matrix", missing)
    assert not Matrix(torch.randn(96, 96)).is_packed
    matrices._keeps_bits.cache_clear()


def test_numbers_of_rows_are_few_and_little_is_added() -> None:
    steps = [row_steps(count) for count in range(1, 4097)]
    assert steps[:9] == [4, 4, 4, 4, 6, 6, 8, 8, 16]
    assert all(count <= step <= max(count + 7, count * 9 / 8) for count, step in enumerate(steps, 1))
    assert steps == sorted(steps)
    assert len(set(steps)) <= 70


def test_a_packed_model_samples_the_same_alone_and_in_company_and_agrees_with_transformers() -> None:
    model = make_model(tiny_config(hidden_size=96, intermediate_size=256, head_dim=32))
    asked = [ask(str(i), [(7 * i + j) % 250 for j in range(3 + 9 * i)], n=1 + i, seed=i) for i in range(5)]
    together = [sampled(one) for one in run_requests(make_scheduler(model, max_slots=16), asked)]
    for request, expected in zip(asked, together, strict=True):
        (alone,) = run_requests(make_scheduler(model, max_slots=16), [request])
        assert sampled(alone) == expected
        for token_ids, logprobs in expected:
            ids = [*request.prompt_ids, *token_ids]
            reference = picked_logprobs(model, ids)[len(request.prompt_ids) - 1 :]
            assert (reference - torch.tensor(logprobs)).abs().max() < 1e-4
