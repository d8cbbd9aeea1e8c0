"""Until when a group's rollouts are to be scored, and what of that one reward function may take.

Parts: `scored_by` (says until when), `limit_s` (what a function may take now). Whoever gives a group its time ends it
when that is over, with every reward in it; so a function that never answers, as one does that asks a judge which hangs,
is given up before. Invariant: a function that takes all of its share leaves some of the time to those that follow it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

SHARE: Final = 0.9
"""Of what is left."""
_ENDS_AT: ContextVar[float | None] = ContextVar("scoring_ends_at", default=None)


@contextmanager
def scored_by(ends_at: float | None) -> Iterator[None]:
    """What is called inside is to be over by a time of the loop; None leaves it as it is."""
    if ends_at is None:
        yield
        return
    token = _ENDS_AT.set(ends_at)
    try:
        yield
    finally:
        _ENDS_AT.reset(token)


def limit_s(own_s: float | None) -> float | None:
    """Seconds for a function that begins now and has a limit of `own_s` itself."""
    ends_at = _ENDS_AT.get()
    if ends_at is None:
        return own_s
    left_s = max(0.0, SHARE * (ends_at - asyncio.get_running_loop().time()))
    return left_s if own_s is None else min(own_s, left_s)
