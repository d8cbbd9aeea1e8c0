"""Time that passes by itself: an event loop whose clock jumps to the next timer.

Parts: `VirtualTimeLoop`, `run_virtually`, `Deadlock`. Invariant: what runs on it happens in the same order each time,
and what can make no further move raises `Deadlock` at once, because nothing is left to wait for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

TICK_S = 1e-9


class Deadlock(RuntimeError):
    """Every task waits and no timer is left, or the run has used up its simulated time."""


class _InstantSelector(selectors.DefaultSelector):
    """Never sleeps: where a real one would wait, the loop's clock jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock("every task waits for another one and no timer is left")
        # Never quite zero: code that asks for less than the clock can tell apart must still see time go on.
        self.now += max(timeout, TICK_S)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time. Threads are run in place, so that the order is always the same."""

    def __init__(self) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._instant.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run at once, in this thread."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a `VirtualTimeLoop`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
