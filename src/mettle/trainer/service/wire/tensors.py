"""Tensors of the wire as arrays: dense or compressed rows (CSR), little-endian, two types in requests.

Parts: `read_tensor` and `tensor_message` (protobuf), `read_json_tensor` and `json_tensor` (JSON). Invariant: an array
is made only after its size is known to be that of the bytes that came, or, for a sparse one, within `MAX_ELEMENTS`;
what does not add up is a UserError that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from mettle.errors import UserError
from mettle.trainer.service.wire import messages

MAX_ELEMENTS: Final = 1 << 24
"""Elements of one tensor; a sparse one of few bytes could ask for any number."""
_TYPES: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<i8"),
    3: np.dtype("<i4"),
    4: np.dtype("<u2"),
}
_NUMBERS: Final[dict[np.dtype[Any], int]] = {np.dtype("<f4"): 1, np.dtype("<i8"): 2}
_NAMES: Final[dict[str, np.dtype[Any]]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}


def read_tensor(tensor: messages.Message, name: str) -> np.ndarray:
    """An array of float32 or int64. Raises: UserError."""
    stored = _TYPES.get(tensor.dtype)
    if stored is None:
        raise UserError(f"{name}: dtype {tensor.dtype} is unknown; 1 is float32, 2 is int64")
    shape = checked_shape(list(tensor.shape), name)
    kind = tensor.WhichOneof("encoding")
    if kind == "sparse_csr":
        csr = tensor.sparse_csr
        values = _plain(_array(csr.values, stored, name))
        rows, columns = (_array(part, np.dtype("<i8"), name) for part in (csr.crow_indices, csr.col_indices))
        return from_csr(values, rows, columns, shape, name)
    return _shaped(_plain(_array(tensor.dense, stored, name)), shape, name)


def read_json_tensor(value: object, name: str) -> np.ndarray:
    """The same of its JSON form. Raises: UserError."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name}: a tensor is an object with data and dtype")
    stored = _NAMES.get(str(value.get("dtype")))
    if stored is None:
        raise UserError(f"{name}: dtype {value.get('dtype')!r} is unknown; float32 and int64 are taken")
    data = _json_array(value.get("data"), stored, name)
    rows, columns = value.get("sparse_crow_indices"), value.get("sparse_col_indices")
    given = value.get("shape")
    shape = (len(data),) if given is None else checked_shape(given, name)
    if rows is None and columns is None:
        return _shaped(data, shape, name)
    integer = np.dtype("<i8")
    return from_csr(data, _json_array(rows, integer, name), _json_array(columns, integer, name), shape, name)


def tensor_message(array: np.ndarray) -> messages.Message:
    """A dense tensor of an array of float32 or int64."""
    data = np.ascontiguousarray(array)
    return messages.TensorMessage(dense=data.tobytes(), dtype=_NUMBERS[data.dtype], shape=data.shape)


def json_tensor(array: np.ndarray) -> dict[str, Any]:
    """The same in its JSON form."""
    dtype = "float32" if array.dtype.kind == "f" else "int64"
    return {"data": array.ravel().tolist(), "dtype": dtype, "shape": list(array.shape)}


def from_csr(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, ...], name: str
) -> np.ndarray:
    """The dense matrix of compressed rows. Raises: UserError."""
    if len(shape) != 2 or len(rows) != shape[0] + 1 or len(columns) != len(values):
        raise UserError(f"{name}: {len(rows)} row bounds and {len(columns)} columns don't make a matrix {shape}")
    counts = np.diff(rows)
    # The first bound before the differences: bounds near the limits of int64 could wrap round to good ones.
    if rows[0] != 0 or rows[-1] != len(values) or (rows < 0).any() or (counts < 0).any():
        raise UserError(f"{name}: the row bounds of a sparse tensor must rise from 0 to {len(values)}")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise UserError(f"{name}: a column index is outside of 0 to {shape[1] - 1}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def checked_shape(shape: object, name: str) -> tuple[int, ...]:
    """A shape of at most two axes and `MAX_ELEMENTS`. Raises: UserError."""
    if not isinstance(shape, list):
        raise UserError(f"{name}: a shape is a list of sizes")
    sizes = tuple(shape)
    if len(sizes) > 2 or not all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in sizes):
        raise UserError(f"{name}: a shape has one or two sizes of at most {MAX_ELEMENTS:,}, got {str(sizes)[:80]}")
    if math.prod(sizes) > MAX_ELEMENTS:
        raise UserError(f"{name}: {math.prod(sizes):,} elements, at most {MAX_ELEMENTS:,} are taken")
    return sizes


def _array(data: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise UserError(f"{name}: {len(data)} bytes are no whole number of {dtype.name} values")
    return np.frombuffer(data, dtype)


def _plain(array: np.ndarray) -> np.ndarray:
    """float32 or int64: a 16-bit brain float is the upper half of a float32."""
    if array.dtype == np.dtype("<u2"):
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype("<i8") if array.dtype == np.dtype("<i4") else array


def _shaped(array: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    if not shape and array.size != 1:
        shape = (array.size,)  # no shape was sent: a row
    if array.size != math.prod(shape):
        raise UserError(f"{name}: {array.size} values don't fill the shape {list(shape)}")
    return array.reshape(shape or (1,))


def _json_array(value: object, dtype: np.dtype, name: str) -> np.ndarray:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MAX_ELEMENTS:
        raise UserError(f"{name}: a tensor's data is a flat list of numbers")
    wanted = (int,) if dtype.kind == "i" else (int, float)
    if not all(type(item) in wanted for item in value):
        raise UserError(f"{name}: every value must be a number of {dtype.name}")
    try:
        return np.array(value, dtype)
    except (OverflowError, ValueError):
        raise UserError(f"{name}: a value is too large for {dtype.name}") from None
