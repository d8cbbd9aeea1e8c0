"""Waiting that says what it waits for.

Parts: `Pulse` (something changed, look again), `Waits` (wait for a condition, with an owner, an edge and a budget).
Invariant: a wait that lasts stands in this process's beat while it lasts, and one that uses up its budget ends as a
`ServiceError` that prints who waits for whom. It never ends in silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mettle.errors import ServiceError
from mettle.processes.beats import Heartbeat
from mettle.processes.liveness import ENVIRONMENTS

REPORT_AFTER_S = 1.0
"""A wait shorter than this is no news."""
AWAITED_PROCESS = {"weights": "trainer", "inference": "inference", "rollouts": ENVIRONMENTS, "evaluation": ENVIRONMENTS}
"""Which process an edge waits for."""


class Pulse:
    """Wakes everybody who waits for a change. One event loop only."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        """Something changed: whoever waits looks again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Until the next `fire`, or until the time is over."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        if timeout_s is None:
            await waiter
            return
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return


class Waits:
    """Waits of this process, by owner. An owner has one wait at a time."""

    def __init__(self, heart: Heartbeat, pulse: Pulse) -> None:
        self._heart = heart
        self._pulse = pulse

    @contextmanager
    def told(self, owner: str, edge: str, awaits: str, *, budget_s: float) -> Iterator[None]:
        """Say that `owner` waits while the block runs."""
        with self._heart.waiting(owner, edge, AWAITED_PROCESS[edge], awaits, budget_s=budget_s):
            yield

    async def until(
        self, is_over: Callable[[], bool], *, edge: str, awaits: str, budget_s: float, owner: str = "orchestrator"
    ) -> float:
        """Wait until `is_over()`, which is asked again at every pulse; returns the seconds it took.

        Raises: ServiceError when the budget is used up.
        """
        if is_over():
            return 0.0
        loop = asyncio.get_running_loop()
        started = loop.time()
        while loop.time() - started < REPORT_AFTER_S:
            await self._pulse.wait(REPORT_AFTER_S - (loop.time() - started))
            if is_over():
                return loop.time() - started
        with self.told(owner, edge, awaits, budget_s=budget_s):
            while loop.time() - started < budget_s:
                await self._pulse.wait(budget_s - (loop.time() - started))
                if is_over():
                    return loop.time() - started
            raise ServiceError(self.stall(owner, edge, awaits, budget_s))

    def stall(self, owner: str, edge: str, awaits: str, budget_s: float) -> str:
        """The line that a stalled wait ends with."""
        now = self._heart.clock()
        graph = "; ".join(
            f"{wait.owner} waits on {wait.edge} for {wait.awaits} since {now - wait.since:.0f} s"
            for wait in self._heart.waits
        )
        return (
            f"stalled: {owner} waited {budget_s:.0f} s on {edge} for: {awaits}. Who waits for whom: {graph or 'nobody'}"
        )
