"""Functions of single numbers, whose bits hang on nothing else: not on how many there are, nor on the threads.

torch computes some functions 32 numbers at a time, and what is left over one by one with another exponential, which
differs in the last bit. Many numbers it divides evenly among its threads, so that what is left over is anywhere: three
threads gave 3 of 256,256 numbers other bits than one. So several threads get them in pieces that end where a row does.

Legend: R rows, F numbers of each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_OF_ONE_THREAD = 16_384
"""So many numbers torch leaves to one thread."""
_OF_EACH_THREAD = 32_768
"""From so many for each on, all of its threads get as many."""


def silu(rows_RF: Tensor) -> Tensor:
    """x / (1 + exp(-x)) of rows that do not lie side by side, as those are that were cut out of longer ones."""
    return _by_rows(F.silu, rows_RF)


def gelu_tanh(rows_RF: Tensor) -> Tensor:
    """GELU, approximated by a tanh, of such rows."""
    return _by_rows(lambda rows: F.gelu(rows, approximate="tanh"), rows_RF)


def sigmoid(numbers: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of a multiple of 32 numbers that lie side by side."""
    return _by_pieces(torch.sigmoid, numbers)


def log_add_exp(numbers: Tensor, others: Tensor) -> Tensor:
    """log(exp(x) + exp(y)) of as many."""
    return _by_pieces(torch.logaddexp, numbers, others)


def _is_shared(numbers: Tensor) -> bool:
    return numbers.numel() > _OF_ONE_THREAD and numbers.device.type == "cpu" and torch.get_num_threads() > 1


def _by_rows(function: Callable[[Tensor], Tensor], rows_RF: Tensor) -> Tensor:
    if not _is_shared(rows_RF):
        return function(rows_RF)
    num_rows, length = rows_RF.shape
    threads = torch.get_num_threads()
    # As many rows for each thread, where there are enough for all; the rest for one.
    even = num_rows // threads * threads
    if even * length < threads * _OF_EACH_THREAD:
        even = 0
    few = max(1, _OF_ONE_THREAD // length)
    pieces = [rows_RF[:even]] if even else []
    pieces += [rows_RF[at : at + few] for at in range(even, num_rows, few)]
    return torch.cat([function(piece) for piece in pieces])


def _by_pieces(function: Callable[..., Tensor], *numbers: Tensor) -> Tensor:
    if not _is_shared(numbers[0]):
        return function(*numbers)
    pieces = zip(*(torch.split(part.flatten(), _OF_ONE_THREAD) for part in numbers), strict=True)
    return torch.cat([function(*piece) for piece in pieces]).view(numbers[0].shape)
