"""How many rollouts run at a time, over all evaluations of one command.

Parts: `Slots`. Invariant: whoever waits for several slots gets them before anybody who came later takes one, so that
two groups never hold half of what each other needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """`num_slots` places for rollouts."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = asyncio.Semaphore(num_slots)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def take(self, num: int) -> AsyncIterator[None]:
        """Hold `num` places (all of them when there are fewer) while the block runs."""
        num = min(num, self.num_slots)
        held = 0
        try:
            async with self._turn:
                while held < num:
                    await self._free.acquire()
                    held += 1
            yield
        finally:
            for _ in range(held):
                self._free.release()
