"""Lines out of a stream of an HTTP answer, however it is cut into pieces. Invariant: a line has a greatest length."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import aiohttp

from mettle.sandbox.containers.faults import ControlPlaneError

_MAX_LINE_BYTES: Final = 8 << 20


async def read_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines that are not empty. Raises: ControlPlaneError for one that does not end."""
    left = b""
    async for piece in content.iter_any():
        *whole, left = (left + piece).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(left) > _MAX_LINE_BYTES:
            raise ControlPlaneError(f"a line of an answer is longer than {_MAX_LINE_BYTES >> 20} MB")
    if left.strip():
        yield left
