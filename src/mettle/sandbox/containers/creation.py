"""Making something elsewhere that must not be lost.

Invariant: when the caller is cancelled while it is made, the making is finished, and what was made is undone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from mettle.errors import MettleError

T = TypeVar("T")


async def make_or_undo(making: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[object]]) -> T:
    """What `making` gives. A request that is cut off half-way may have been carried out, and nobody would know."""
    task = asyncio.ensure_future(making)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(MettleError):
            await undo(await task)
        raise
