"""Pacing: rollouts take turns on the event loop, so that two thousand of them waking at once do not hold it up.

Parts: `Pacer`, `pacer`, `pace`. A coroutine asks `if pace.is_spent: await pace.turn()` before a piece of work of its
own (a rollout's start, a model's answer, scoring). While the slice of this iteration of the loop has time left it goes
on at once; else it waits in line, and each later iteration lets in as many as fit in a slice by what they took so far.
Invariants: first come, first served; a waiter that is cancelled is skipped; there is one pacer per event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import perf_counter
from weakref import WeakKeyDictionary

SLICE_S = 0.005
"""Work of one iteration of the loop. Others (heartbeats, sockets, a progress bar) wait at most about this long."""


class Pacer:
    """The turns of one event loop. Not thread-safe: it belongs to its loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slice_s: float = SLICE_S) -> None:
        self._loop = loop
        self._slice_s = slice_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ends_at = 0.0
        self._is_open = False
        self._num_admitted = 1
        self._started = 0.0

    @property
    def is_spent(self) -> bool:
        """True when whoever asks should wait for its turn."""
        if self._waiting:
            return True
        if self._is_open:
            return perf_counter() >= self._ends_at
        self._open(0)
        return False

    async def turn(self) -> None:
        """Wait in line for a later iteration of the loop."""
        waiter = self._loop.create_future()
        self._waiting.append(waiter)
        if not self._is_open:
            self._open(0)
        await waiter

    def _open(self, num_admitted: int) -> None:
        """Begin a slice; it ends when the loop comes round to `_end`."""
        self._is_open = True
        self._started = perf_counter()
        self._ends_at = self._started + self._slice_s
        self._num_admitted = num_admitted
        self._loop.call_soon(self._end)

    def _end(self) -> None:
        self._is_open = False
        if not self._waiting:
            return
        spent = perf_counter() - self._started
        num_wanted = self._num_wanted(spent)
        num_admitted = 0
        while self._waiting and num_admitted < num_wanted:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                num_admitted += 1
        self._open(num_admitted)

    def _num_wanted(self, spent: float) -> int:
        """How many to let in: twice as many while a slice is half empty, fewer once it ran over."""
        if not self._num_admitted:
            return 8
        if spent < self._slice_s / 2:
            return self._num_admitted * 2
        return max(1, int(self._num_admitted * self._slice_s / spent))


_pacers: WeakKeyDictionary[asyncio.AbstractEventLoop, Pacer] = WeakKeyDictionary()


def pace(loop: asyncio.AbstractEventLoop, slice_s: float) -> None:
    """Let a loop's turns be of another length; infinite on a clock that is not this host's."""
    _pacers[loop] = Pacer(loop, slice_s)


def pacer() -> Pacer:
    """The running loop's pacer."""
    loop = asyncio.get_running_loop()
    found = _pacers.get(loop)
    if found is None:
        found = _pacers[loop] = Pacer(loop)
    return found
