"""Tensors of the wire: what goes in comes out, and bytes of any kind are an array or one line."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mettle.errors import UserError
from mettle.trainer.service.wire import messages
from mettle.trainer.service.wire.tensors import (
    MAX_ELEMENTS,
    from_csr,
    json_tensor,
    read_json_tensor,
    read_tensor,
    tensor_message,
)

shapes = hnp.array_shapes(min_dims=1, max_dims=2, max_side=6)
arrays = hnp.arrays(np.int64, shapes) | hnp.arrays(np.float32, shapes, elements=st.floats(width=32, allow_nan=False))


@given(arrays)
def test_a_tensor_comes_out_as_it_went_in_by_either_encoding(array):
    by_bytes = read_tensor(messages.parse(messages.TensorMessage, messages.encode(tensor_message(array))), "x")
    by_json = read_json_tensor(json_tensor(array), "x")
    for found in (by_bytes, by_json):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


@given(hnp.arrays(np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.integers(0, 2)))
def test_compressed_rows_are_the_matrix_that_they_stand_for(array):
    rows, columns = array.nonzero()
    bounds = np.searchsorted(rows, np.arange(len(array) + 1))
    np.testing.assert_array_equal(from_csr(array[rows, columns], bounds, columns, array.shape, "x"), array)
    csr = {"values": array[rows, columns].tobytes(), "crow_indices": bounds.tobytes(), "col_indices": columns.tobytes()}
    message = messages.TensorMessage(sparse_csr=csr, dtype=2, shape=array.shape)
    np.testing.assert_array_equal(read_tensor(message, "x"), array)


wild = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)


@given(wild, wild, wild, st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4), max_size=3), st.integers(-1, 5))
def test_hostile_rows_are_a_matrix_or_one_line(values, rows, columns, shape, dtype):
    csr = {
        name: np.array(part, "<i8").tobytes()
        for name, part in (("values", values), ("crow_indices", rows), ("col_indices", columns))
    }
    with suppress(UserError):
        found = read_tensor(messages.TensorMessage(sparse_csr=csr, dtype=dtype, shape=shape), "weights")
        assert list(found.shape) == shape


def test_a_few_bytes_cannot_ask_for_all_memory():
    csr = {"values": b"", "crow_indices": bytes(8 * 5), "col_indices": b""}
    message = messages.TensorMessage(sparse_csr=csr, dtype=1, shape=[4, MAX_ELEMENTS])
    with pytest.raises(UserError, match="at most"):
        read_tensor(message, "weights")


def test_brain_floats_are_the_upper_half_of_a_float():
    upper = (np.array([1.5, -2.0], "<f4").view("<u4") >> 16).astype("<u2")
    message = messages.TensorMessage(dense=upper.tobytes(), dtype=4, shape=[2])
    np.testing.assert_array_equal(read_tensor(message, "x"), np.array([1.5, -2.0], "<f4"))


@pytest.mark.parametrize(
    "tensor",
    [
        None, [], {"data": [1]}, {"data": [1], "dtype": "int32"}, {"data": "ab", "dtype": "int64"},
        {"data": [1.5], "dtype": "int64"}, {"data": [True], "dtype": "int64"}, {"data": [2**70], "dtype": "int64"},
        {"data": [1], "dtype": "int64", "shape": [2]}, {"data": [1], "dtype": "int64", "shape": "1"},
        {"data": [1], "dtype": "int64", "shape": [1], "sparse_crow_indices": [0, 1]},
        {"data": [None], "dtype": "float32"}, {"data": {}, "dtype": "float32"},
    ],
)  # fmt: skip
def test_json_that_is_no_tensor_is_one_line(tensor):
    with pytest.raises(UserError, match=r"^advantages: "):
        read_json_tensor(tensor, "advantages")
