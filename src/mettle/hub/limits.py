"""How often something may be asked: a bucket of tokens for each key, in memory.

Behind a proxy every browser has the proxy's address, so that the limits by name are the ones that hold there.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from mettle.web.problems import HttpError

MAX_KEYS: Final = 10_000


class RateLimit:
    """`burst` at once, then `per_minute`. Raises from `take`: HttpError 429 with the time to wait."""

    def __init__(self, burst: int, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._rate, self._clock = float(burst), per_minute / 60.0, clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, what: str) -> None:
        """Count one of `what` for a key."""
        with self._lock:
            now = self._clock()
            left, then = self._buckets.pop(key, (self._burst, now))
            left = min(self._burst, left + (now - then) * self._rate)
            self._buckets[key] = (left - 1 if left >= 1 else left, now)
            while len(self._buckets) > MAX_KEYS:
                self._buckets.popitem(last=False)
        if left < 1:
            wait = int((1 - left) / self._rate) + 1
            raise HttpError(
                429, f"too many {what}; try again in {wait} s", code="rate_limited", headers={"Retry-After": str(wait)}
            )
