"""The time of day by a clock that nobody sets: what begins and ends by it has the length that it took.

Invariant: a later reading in the same process is never smaller, and two readings differ by the time between them.
"""

from __future__ import annotations

import time

_AT_ZERO = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since the epoch: the host's clock at the start of this process, and CLOCK_MONOTONIC from there."""
    return _AT_ZERO + time.monotonic()
