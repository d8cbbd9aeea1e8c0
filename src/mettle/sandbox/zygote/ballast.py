"""Fills the holes that loading has left in the interpreter's memory, so that what clones make lies close together.

A clone gets a copy of each page that it writes to. What it makes in holes that lie all over the memory costs a page a
piece; what it makes behind them lies side by side.
Invariant: nothing depends on it. An interpreter that lays its memory out otherwise holds some bytes for nothing.
"""

from __future__ import annotations

import sys
from typing import Final

_STEP_BYTES: Final = 16
_LARGEST_BYTES: Final = 512  # what is larger the C library keeps
_OWN_BYTES: Final = sys.getsizeof(b"")
_NUM_NEIGHBOURS: Final = 12
_MAX_PIECES: Final = 4096
_SORTING_BYTES: Final = 100_000


def fill_holes() -> list[bytes]:
    """What fills them, as long as it is kept: pieces of each size, until so many in a row are neighbours."""
    ballast: list[bytes] = []
    first = -(-(_OWN_BYTES + 1) // _STEP_BYTES) * _STEP_BYTES
    for num_bytes in range(first, _LARGEST_BYTES + 1, _STEP_BYTES):
        num_neighbours, before = 0, 0
        for _ in range(_MAX_PIECES):
            piece = bytes(num_bytes - _OWN_BYTES)
            ballast.append(piece)
            num_neighbours = num_neighbours + 1 if id(piece) == before + num_bytes else 0
            if num_neighbours == _NUM_NEIGHBOURS:
                break
            before = id(piece)
    bytearray(_SORTING_BYTES)  # for which the C library sorts what was given back to it: each clone would do it again
    return ballast
