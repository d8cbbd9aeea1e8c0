"""One reward function: what it asks for, where it runs, how long it takes, and how long it may take.

Parts: `run_in` (the decorator that chooses the place), `RewardFunction`. A coroutine function that awaits something
runs on the event loop, and is named when it holds that up; one that never awaits is a plain function in all but name. A
plain function is tried in a thread first; after `NUM_TRIED` quick calls in a row it runs on the loop, where a call
costs microseconds, and goes back to its thread for good once it holds the loop up (half of its recent calls over
`SLOW_S`, or one over `STALL_S`, by the `stopwatch`). Invariants: a call gives a `Score` and raises nothing but a
cancellation from outside; what has hung or raised is named.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

from mettle.envs.rubrics.coroutines import HoldMeter, in_a_loop_of_its_own, never_waits, to_its_end
from mettle.envs.rubrics.processes import shared_processes
from mettle.envs.rubrics.scoring import limit_s
from mettle.envs.rubrics.stopwatch import Used, held_s, used
from mettle.envs.rubrics.threads import ThreadLane
from mettle.envs.rubrics.values import FAILURES, Overrun, Score, failure_of, number_from
from mettle.envs.signatures import is_async, signature_of
from mettle.errors import JudgeError, RolloutError
from mettle.evals.estimator import median

logger = logging.getLogger(__name__)

Place = Literal["loop", "thread", "process"]
Function = TypeVar("Function", bound=Callable[..., Any])

SLOW_S = 0.005
STALL_S = 0.05
NUM_TRIED = 3
NUM_REMEMBERED = 32
WANTS_THE_LOOP = ("main thread", "event loop", "same thread")
"""Parts of the messages with which signal, asyncio and sqlite3 refuse to work in another thread."""


def run_in(place: Place, *, timeout_s: float | None = None, max_parallel: int = 1) -> Callable[[Function], Function]:
    """Choose where a reward function runs: on the "loop", in a "thread", or in a "process".

    In a process it can be killed, and cannot hold up anything; it must be importable by name, and take what can be
    pickled (`completion`, `answer`, `info`; not `state`). `max_parallel` calls of it run at a time. In a thread or a
    process a coroutine function gets an event loop of its own, and must not use what belongs to the rollouts' loop.
    """
    if place not in ("loop", "thread", "process"):
        raise ValueError(f"a reward function runs in 'loop', 'thread' or 'process', not {place!r}")

    def marked(function: Function) -> Function:
        function.runs_in, function.timeout_s, function.max_parallel = place, timeout_s, max_parallel  # type: ignore[attr-defined]
        return function

    return marked


class RewardFunction:
    """`function` with its signature, its place and its durations."""

    def __init__(self, function: Callable[..., Any], timeout_s: float | None, place: Place | None = None) -> None:
        self.function = function
        self.name = func_name(function)
        self.signature = signature_of(function)
        own_timeout_s = getattr(function, "timeout_s", None)
        self.timeout_s: float | None = timeout_s if own_timeout_s is None else own_timeout_s
        chosen: Place | None = getattr(function, "runs_in", None) or place
        self._is_chosen = chosen is not None
        self._call, self.place = _call_and_place(function, chosen)
        self._meter = HoldMeter(self.name) if self.place == "loop" and not self._is_chosen else None
        self._held: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._used = Used()
        self._durations: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self.num_calls = 0
        self._is_trial = self.place == "thread" and not self._is_chosen
        self._lane: ThreadLane | None = None

    @property
    def is_group(self) -> bool:
        """True when it looks at a whole group."""
        return self.signature.is_group

    def begin(self) -> None:
        """Several calls of `start` follow, with nothing between them."""
        if not self._is_chosen:
            self._used = used()

    def start(self, available: Mapping[str, Any]) -> Score | Awaitable[Score]:
        """The score of one rollout, or what will become it."""
        if self.place != "loop":
            return self._number_elsewhere(self.signature.pick(available))
        value = self.start_value(available)
        if isinstance(value, RolloutError):
            return value
        return self._number(value) if isinstance(value, Awaitable) else number_from(self.name, value)

    def start_value(self, available: Mapping[str, Any]) -> Any:
        """What the function returns, a `RolloutError`, or an awaitable of one of them."""
        arguments = self.signature.pick(available)
        if self.place != "loop":
            return self._elsewhere(arguments)
        started = time.perf_counter()
        try:
            value = self._call(**arguments)
        except FAILURES as error:
            return failure_of(self.name, error)
        if isinstance(value, Awaitable):
            return self._awaited(value, started)
        duration_s = time.perf_counter() - started
        self._remember(duration_s, held_s(duration_s, self._used))
        return value

    def stats(self) -> dict[str, Any]:
        """Calls so far, where the next one runs, the median and longest of the recent durations; of coroutines, how
        long one held the loop at most.
        """
        recent = list(self._durations)
        return {
            "runs_in": self.place,
            "num_calls": self.num_calls,
            "p50_ms": median(recent) * 1e3 if recent else None,
            "max_ms": max(recent) * 1e3 if recent else None,
            "held_ms": self._meter.longest_s * 1e3 if self._meter is not None else None,
        }

    async def _number(self, value: Awaitable[Any]) -> Score:
        awaited = await value
        return awaited if isinstance(awaited, RolloutError) else number_from(self.name, awaited)

    async def _number_elsewhere(self, arguments: Mapping[str, Any]) -> Score:
        # Made in here: cancelled before its first step, a coroutine would leave one that it was given unawaited.
        return await self._number(self._elsewhere(arguments))

    async def _awaited(self, value: Awaitable[Any], started: float) -> Any:
        timeout_s = limit_s(self.timeout_s)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                meter = self._meter
                returned = await (meter.watch(value) if meter and isinstance(value, Coroutine) else value)
        except TimeoutError as error:
            return self._overrun(error, timeout_s) if limit.expired() else failure_of(self.name, error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return failure_of(self.name, error)
        except FAILURES as error:
            return failure_of(self.name, error)
        self.num_calls += 1
        self._durations.append(time.perf_counter() - started)
        return returned

    async def _elsewhere(self, arguments: Mapping[str, Any]) -> Any:
        if self.place == "process":
            return await self._in_process(arguments)
        if self._lane is None:
            self._lane = ThreadLane(self.name, getattr(self.function, "max_parallel", 1))
        timeout_s = limit_s(self.timeout_s)
        try:
            value, duration_s, held = await self._lane.run(partial(_timed, self._call, arguments), timeout_s)
        except Overrun as error:
            return self._overrun(error, timeout_s)
        except FAILURES as error:
            if self._is_chosen or not any(sign in str(error) for sign in WANTS_THE_LOOP):
                return failure_of(self.name, error)
            self.place, self._is_chosen = "loop", True
            value = self.start_value(arguments)
            return await value if isinstance(value, Awaitable) else value
        if isinstance(value, Awaitable):
            self.place, self._is_chosen = "loop", True
            return await self._awaited(value, time.perf_counter())
        self._remember(duration_s, held)
        return value

    async def _in_process(self, arguments: Mapping[str, Any]) -> Any:
        processes = shared_processes("rewards", getattr(self.function, "max_parallel", 1))
        started, timeout_s = time.perf_counter(), limit_s(self.timeout_s)
        target = f"{self.function.__module__}:{self.function.__qualname__}"
        try:
            value = await processes.call(target, dict(arguments), timeout_s=timeout_s)
        except Overrun as error:
            return self._overrun(error, timeout_s)
        except FAILURES as error:
            return failure_of(self.name, error)
        self.num_calls += 1
        self._durations.append(time.perf_counter() - started)
        return value

    def _overrun(self, error: Exception, timeout_s: float | None) -> JudgeError:
        shown = timeout_s if timeout_s == self.timeout_s else round(timeout_s or 0.0, 1)
        made = JudgeError(f"{self.name}: no score within {shown} s")
        made.__cause__ = error
        return made

    def _remember(self, duration_s: float, held: float) -> None:
        """Count a call, and move the function to where its calls belong."""
        self.num_calls += 1
        self._durations.append(duration_s)
        if self._is_chosen:
            return
        self._held.append(held)
        if self.place == "loop" and held > SLOW_S:
            if held > STALL_S or median(self._held) > SLOW_S:
                self.place, self._is_trial = "thread", False
                logger.info("reward function holds the event loop up; it runs in a thread from here on: %s", self.name)
        elif self._is_trial and len(self._held) >= NUM_TRIED:
            self._is_trial = max(list(self._held)[-NUM_TRIED:]) > SLOW_S
            self.place = "thread" if self._is_trial else "loop"


def func_name(function: Callable[..., Any]) -> str:
    """The name under which a function's score is recorded."""
    if isinstance(function, partial):
        return func_name(function.func)
    return getattr(function, "__name__", None) or type(function).__name__


def _timed(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, float, float]:
    """What a call returns, its seconds by the clock, and those in which it held its thread up."""
    before, started = used(), time.perf_counter()
    value = function(**arguments)
    duration_s = time.perf_counter() - started
    return value, duration_s, held_s(duration_s, before)


def _call_and_place(function: Callable[..., Any], chosen: Place | None) -> tuple[Callable[..., Any], Place]:
    """How a function is called, and where at first."""
    if not is_async(function):
        return function, chosen or "thread"
    if chosen != "loop" and never_waits(function):
        return to_its_end(function), chosen or "thread"
    return (in_a_loop_of_its_own(function) if chosen == "thread" else function), chosen or "loop"
