"""Reward functions that are coroutines: whether they ever wait, how long they keep the event loop, and other loops.

Parts: `never_waits`, `to_its_end`, `in_a_loop_of_its_own`, `HoldMeter`. A coroutine gives the loop back only where it
awaits; what it computes in between holds every other rollout up. Invariants: a function that contains no `await` is
known from its code, not from what it happened to do; a coroutine that is measured is driven as the loop would drive it,
in the same task, and a slow machine is told from a function that computes by the thread's own CPU time.
"""

from __future__ import annotations

import asyncio
import dis
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from time import perf_counter, thread_time
from typing import Any

from mettle.evals.estimator import median

logger = logging.getLogger(__name__)

HOLD_S = 0.05
"""Longer than this between two awaits is noticed by everything else on the loop."""
NUM_HOLDS = 2
NUM_REMEMBERED = 32
NUM_FOR_MEDIAN = 8
WAITING = frozenset({"GET_AWAITABLE", "GET_ANEXT", "YIELD_VALUE", "SEND", "BEFORE_ASYNC_WITH", "YIELD_FROM"})


def never_waits(function: Callable[..., Any]) -> bool:
    """Whether a coroutine function contains no `await`, so that any thread can run it to its end without a loop."""
    while isinstance(function, partial):
        function = function.func
    called = function if hasattr(function, "__code__") else getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(called, "__code__", None)
    return code is not None and not any(step.opname in WAITING for step in dis.get_instructions(code))


def to_its_end(function: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine function that never waits, as a plain one."""

    def plain(**arguments: Any) -> Any:
        coroutine: Coroutine[Any, Any, Any] = function(**arguments)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        coroutine.close()
        raise AssertionError(f"{function} contains no await, and waits")

    return plain


def in_a_loop_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine function as a plain one, for a thread that has no loop."""

    def plain(**arguments: Any) -> Any:
        return asyncio.run(function(**arguments))

    return plain


class HoldMeter:
    """How long the coroutines of the function `name` hold the loop; says so once when that is too long."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.longest_s = 0.0
        self._recent: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._num_holds = 0
        self._has_warned = False

    def watch(self, coroutine: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        """The coroutine, measured while it is awaited."""
        return _Watched(coroutine, self)

    def add(self, held_s: float, cpu_s: float) -> None:
        """Count the longest hold of a call, in wall time and in CPU time of the thread."""
        self.longest_s = max(self.longest_s, held_s)
        self._recent.append(held_s)
        self._num_holds += cpu_s > HOLD_S
        if self._has_warned or held_s <= HOLD_S:
            return
        is_usual = len(self._recent) >= NUM_FOR_MEDIAN and median(self._recent) > HOLD_S
        if self._num_holds >= NUM_HOLDS or is_usual:
            self._has_warned = True
            logger.warning(
                "reward function %s is async and holds the event loop for %.0f ms at a time, which every rollout waits "
                'for; mark it @vf.run_in("thread") or @vf.run_in("process"), or write it as a plain def',
                self.name,
                held_s * 1e3,
            )


class _Watched:
    __slots__ = ("_coroutine", "_meter")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], meter: HoldMeter) -> None:
        self._coroutine, self._meter = coroutine, meter

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, longest_s, longest_cpu_s = self._coroutine, 0.0, 0.0
        resume: Callable[[Any], Any] = coroutine.send
        given: Any = None
        try:
            while True:
                cpu_started, started = thread_time(), perf_counter()
                try:
                    awaited = resume(given)
                except StopIteration as end:
                    return end.value
                finally:
                    held_s = perf_counter() - started
                    if held_s > longest_s:
                        longest_s, longest_cpu_s = held_s, thread_time() - cpu_started
                try:
                    given, resume = (yield awaited), coroutine.send
                except GeneratorExit:
                    coroutine.close()
                    raise
                except BaseException as error:
                    given, resume = error, coroutine.throw
        finally:
            self._meter.add(longest_s, longest_cpu_s)
