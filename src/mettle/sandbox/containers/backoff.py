"""Waiting for a service that is away or busy: a little longer each time, and not for ever.

Invariant: the waits together stay below the limit; a service that says how long to wait is believed, up to the limit.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Final

_FIRST_S: Final = 0.1
_LONGEST_S: Final = 5.0


class Backoff:
    """The waits of one request."""

    def __init__(self, limit_s: float) -> None:
        self._deadline = time.monotonic() + limit_s
        self._next_s = _FIRST_S

    async def wait(self, asked_s: float | None = None) -> bool:
        """Wait once more; False when that would pass the limit."""
        pause_s = self._next_s * random.uniform(0.5, 1.0) if asked_s is None else asked_s
        self._next_s = min(2 * self._next_s, _LONGEST_S)
        if time.monotonic() + pause_s > self._deadline:
            return False
        await asyncio.sleep(pause_s)
        return True


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """What a busy service asks for; None if it says nothing that can be read."""
    text = headers.get("Retry-After", "").strip()
    return float(text) if text.isdigit() else None
