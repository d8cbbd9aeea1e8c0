"""Weight matrices that rows are multiplied with, packed once for the processor where that keeps every row's bits.

Legend: R rows, D inputs, X outputs. On a CPU, torch hands a plain matrix to a product that must rearrange it each time,
and whose order of addition changes below `MIN_ROWS` rows. oneDNN's packed layout is rearranged once: one row of 4,096 x
1,024 costs a quarter of eight plain ones, 256 rows less than half (Zen 5, one thread; a 128 x 128 matrix costs 5 us
more below 16 rows, and half from 64 rows on).

Invariant: what a row gets does not depend on the number of rows or on its place among them, to the last bit. For packed
products nobody promises that, so each shape is tried out once a process, with the number of threads in use, and one
that breaks it stays plain.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

MIN_ROWS = 8
_MIN_ROWS_OF_THREADS = 12
_MIN_PACKED_ROWS = 4
_MIN_PACKED_SIDE = 96
_TRIED_ROWS = (4, 6, 8, 24, 40, 72)
_TRIED_VALUES = 1 << 24
_TRIED_PERIOD = 4099


def min_rows() -> int:
    """The least rows that a plain product may have in this thread: two threads may share 9 to 11 as 8 and too few."""
    return MIN_ROWS if torch.get_num_threads() == 1 else _MIN_ROWS_OF_THREADS


def with_rows(rows_B: Tensor, count: int | None = None) -> Tensor:
    """`count` rows, or at least `min_rows()`; the added ones are zeros and nobody reads what becomes of them."""
    missing = (min_rows() if count is None else count) - len(rows_B)
    return rows_B if missing <= 0 else torch.cat([rows_B, rows_B.new_zeros(missing, *rows_B.shape[1:])])


def row_steps(num_rows: int) -> int:
    """So many rows or a few more, of which there are few kinds: a packed product is compiled for each number of rows.

    4, 6, 8, then multiples of an eighth of the power of two below, so that at most an eighth is added. Fewer than 4 are
    no cheaper: 24 matrices of 0.5 B parameters' layers took 32 ms for 2 rows, 20 for 4 or 6, 28 for 8, and 23 plain for
    one row (Zen 5, in turns).
    """
    if num_rows <= MIN_ROWS:
        return max(_MIN_PACKED_ROWS, -(-num_rows // 2) * 2)
    step = max(8, 1 << (num_rows.bit_length() - 4))
    return -(-num_rows // step) * step


class Matrix:
    """A matrix [X, D]; packed if it is on a CPU, large enough, and keeps the bits. It holds no plain copy then."""

    __slots__ = ("_packed", "_plain", "_plain_t", "device", "shape")

    def __init__(self, weight_XD: Tensor) -> None:
        self.shape = (int(weight_XD.shape[0]), int(weight_XD.shape[1]))
        self.device = weight_XD.device
        self._packed = _pack(weight_XD)
        self._plain = weight_XD if self._packed is None else None
        self._plain_t = None if self._plain is None else self._plain.t()

    @property
    def is_packed(self) -> bool:
        """True when fewer rows than `min_rows()` will do."""
        return self._packed is not None

    @property
    def num_parameters(self) -> int:
        return self.shape[0] * self.shape[1]

    def times(self, rows_RD: Tensor, bias: Tensor | None = None) -> Tensor:
        """Rows times the matrix, [R, X], plus a bias."""
        if self._packed is not None:
            return packed_product(rows_RD, self._packed, bias)
        assert self._plain is not None, "a matrix is packed or plain"
        return F.linear(rows_RD, self._plain, bias)

    def added_to(self, rows_RX: Tensor, rows_RD: Tensor) -> Tensor:
        """`rows_RX` plus rows times the matrix."""
        if self._packed is not None:
            return packed_product(rows_RD, self._packed).add_(rows_RX)
        assert self._plain_t is not None, "a matrix is packed or plain"
        return torch.addmm(rows_RX, rows_RD, self._plain_t)


def can_pack() -> bool:
    """Whether this build of torch packs matrices at all."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


def packed_matrix(weight_XD: Tensor) -> Tensor:
    """A matrix as oneDNN multiplies with it; only for `packed_product`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_XD.contiguous(), None)
    return packed


def packed_product(rows_RD: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows times a packed matrix, [R, X]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows_RD, packed, bias, "none", [], "")
    return product


def _pack(weight_XD: Tensor) -> Tensor | None:
    if weight_XD.device.type != "cpu" or not can_pack():
        return None
    if min(weight_XD.shape) < _MIN_PACKED_SIDE:
        return None
    outputs, inputs = weight_XD.shape
    if not _keeps_bits(outputs, inputs, weight_XD.dtype, torch.get_num_threads()):
        return None
    return packed_matrix(weight_XD)


@lru_cache(maxsize=256)
def _keeps_bits(outputs: int, inputs: int, dtype: torch.dtype, num_threads: int) -> bool:
    """Whether packed products of this shape give a row the same bits in any company and at any place."""
    noise = torch.randn(_TRIED_PERIOD, generator=torch.Generator().manual_seed(0)).to(dtype)
    outputs = min(outputs, max(_MIN_PACKED_SIDE, _TRIED_VALUES // inputs))
    try:
        packed = packed_matrix(_filled(noise, outputs, inputs))
        rows = _filled(noise.flip(0), max(_TRIED_ROWS) + 1, inputs)
        whole = packed_product(rows, packed, None)
        for count in _TRIED_ROWS:
            for first in (0, 1):
                part = packed_product(rows[first : first + count].clone(), packed, None)
                if not torch.equal(part, whole[first : first + count]):
                    return False
    except (RuntimeError, AttributeError) as error:  # another build of torch
        logger.info("matrices are not packed", extra={"reason": str(error).partition("\n")[0]})
        return False
    return True


def _filled(noise: Tensor, *sizes: int) -> Tensor:
    # Drawing millions of numbers would take longer than the products.
    count = math.prod(sizes)
    return noise.repeat(-(-count // len(noise)))[:count].view(sizes)
