"""Asking again: how long to wait after a failure, and how often.

Parts: `Backoff` (the formula), `Retries` (the waits of one request), `retry_after_s` (what a server asks for).
Invariant: waits grow to a limit and differ from client to client, so that many clients of a server that comes back do
not all ask at once. Imports nothing outside the standard library.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

_random: Final = random.SystemRandom()  # a fork has no copy of its state: clients must differ
_MAX_DOUBLINGS: Final = 64  # more would overflow a float, and every limit is reached long before


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits of `first_s`, `first_s * factor`, ... up to `max_s`, each cut by up to the part `jitter` of it."""

    first_s: float = 0.5
    max_s: float = 30.0
    factor: float = 2.0
    jitter: float = 0.5

    def wait_s(
        self, attempt: int, asked_s: float | None = None, rng: Callable[[float, float], float] = _random.uniform
    ) -> float:
        """Seconds to wait after the failure of attempt `attempt` (from 0); `asked_s`, the server's wish, is obeyed."""
        if asked_s is not None:
            return min(self.max_s, max(0.0, asked_s))
        longest = min(self.max_s, self.first_s * self.factor ** min(max(0, attempt), _MAX_DOUBLINGS))
        return longest * rng(1.0 - self.jitter, 1.0) if self.jitter else longest


DEFAULT_BACKOFF: Final = Backoff()
"""For whoever has no reason to wait otherwise."""


class Retries:
    """The waits of one request, at most `max_retries` of them and at most `limit_s` seconds in all (None: no limit).

    Use as `except Passing: if not await retries.again(): raise`.
    """

    def __init__(
        self,
        backoff: Backoff,
        max_retries: int | None = None,
        limit_s: float | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: Callable[[float, float], float] = _random.uniform,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_done = 0
        self._backoff, self._max_retries = backoff, max_retries
        self._sleep, self._rng, self._clock = sleep, rng, clock
        self._deadline = math.inf if limit_s is None else clock() + limit_s

    async def again(self, asked_s: float | None = None) -> bool:
        """Wait, and say True; False, at once, where no wait is left."""
        if self._max_retries is not None and self.num_done >= self._max_retries:
            return False
        wait_s = self._backoff.wait_s(self.num_done, asked_s, self._rng)
        if self._clock() + wait_s > self._deadline:
            return False
        self.num_done += 1
        await self._sleep(wait_s)
        return True


def retry_after_s(header: str | None) -> float | None:
    """The seconds of a `Retry-After` header, which may be a date; None where it says nothing that can be read."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        pass
    else:
        return seconds if math.isfinite(seconds) else None
    try:
        return parsedate_to_datetime(header).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return None
