"""Experts on the wire: the choices of a mixture's routers as text in JSON, two bytes each.

A token of Qwen3-30B-A3B has 48 layers of 8 experts: 384 numbers, 1,024 characters.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any


def wire_experts(rows: Sequence[Any]) -> str:
    """Rows of int16 arrays, one a token, as base64 of little-endian numbers."""
    numbers = array("h", b"".join(row.tobytes() for row in rows))
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode("ascii")


def read_experts(text: str | None, num_tokens: int) -> array[int]:
    """The numbers, one token after the other; empty for None.

    Raises: ValueError when they are not equally many for each token.
    """
    numbers = array("h", b"" if text is None else b64decode(text, validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    if len(numbers) % max(1, num_tokens) or (len(numbers) and not num_tokens):
        raise ValueError(f"{len(numbers)} experts do not divide among {num_tokens} tokens")
    return numbers
