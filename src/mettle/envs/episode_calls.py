"""Where the calls of a game run: on the event loop when they are quick, else on a thread of the episode's own.

Parts: `Pace`, what the calls of one environment have taken; `EpisodeCalls`, the calls of one episode. Invariants: the
calls of an episode run one at a time and in order, and all on the loop or all on one thread; what hangs holds only its
own daemon thread, so neither the loop nor the end of the process waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mettle.errors import EnvironmentFault

QUICK_CPU_S = 0.002
QUICK_WALL_S = 0.02
QUICK_CALLS = 20
"""So many quick calls in a row, and new episodes run on the loop: a thread would cost more than the call."""
CLOSE_TIMEOUT_S = 5.0


class Pace:
    """How quick the calls of one environment are."""

    def __init__(self) -> None:
        self._quick_in_a_row = 0

    @property
    def is_quick(self) -> bool:
        """Whether a new episode may run on the event loop."""
        return self._quick_in_a_row >= QUICK_CALLS

    def measured(self, function: Callable[[], Any]) -> Any:
        """Call `function` and remember how long it took."""
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return function()
        finally:
            is_quick = time.thread_time() - cpu < QUICK_CPU_S and time.perf_counter() - wall < QUICK_WALL_S
            self._quick_in_a_row = self._quick_in_a_row + 1 if is_quick else 0


class EpisodeCalls:
    """Makes the calls of one episode. With `timeout_s` each has so long, and always runs on a thread."""

    def __init__(self, pace: Pace, timeout_s: float | None = None) -> None:
        self._pace = pace
        self._timeout_s = timeout_s
        self._orders: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._is_on_loop = pace.is_quick and timeout_s is None
        self._is_stuck = False

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`; what it raises is raised.

        Raises: EnvironmentFault when it takes longer than the limit.
        """
        call = partial(self._pace.measured, partial(function, *args))
        if self._is_on_loop:
            return call()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._on_thread(call)
        except TimeoutError as error:
            if not limit.expired():
                raise
            self._is_stuck = True
            name = getattr(function, "__qualname__", repr(function))
            raise EnvironmentFault(f"{name} took longer than {self._timeout_s} s") from error

    async def close(self, function: Callable[[], Any]) -> None:
        """A last call, after which there is none. A thread that is stuck makes it if it ever comes back."""
        if self._is_on_loop:
            function()
            return
        if self._orders is None:
            return
        try:
            async with asyncio.timeout(0 if self._is_stuck else CLOSE_TIMEOUT_S):
                await self._on_thread(function)
        except TimeoutError:
            self._is_stuck = True
        finally:
            self._orders.put(None)

    async def _on_thread(self, call: Callable[[], Any]) -> Any:
        if self._orders is None:
            self._orders = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._orders,), name="episode", daemon=True).start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._orders.put(partial(_answer, loop, done, call))
        return await done


def _work(orders: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (order := orders.get()) is not None:
        order()


def _answer(loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], call: Callable[[], Any]) -> None:
    try:
        result, error = call(), None
    except Exception as raised:
        result, error = None, raised
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(_settle, done, result, error)


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)
