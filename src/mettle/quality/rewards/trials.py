"""Answers scored as a rollout scores them: the environment runs, a script speaks, the rubric looks at the state.

Parts: `TrialOutcome`, `Trials`. Invariants: one event loop for all trials of an environment, because rubrics keep what
they opened; a trial ends within its time limit even when a reward function never comes back (on the main thread, where
a timer can interrupt it).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

from mettle.quality.rewards.scripts import SCRIPT_KEY, EndlessRollout, Policy, ScriptedClient

MODEL = "scripted"


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What an answer earned, or why it earned nothing; how long that took."""

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    is_timeout: bool = False
    is_endless: bool = False

    def __post_init__(self) -> None:
        assert self.reward is None or math.isfinite(self.reward), "the rubric lets no other number through"


class _TimeUp(BaseException):
    """Not an Exception, so that a reward function that swallows those cannot swallow this."""


class Trials:
    """Use as `with Trials(env) as trials`; leaving tears the environment down."""

    def __init__(self, env: Any, *, timeout_s: float = 10.0) -> None:
        self.env = env
        self.timeout_s = timeout_s
        self._runner = asyncio.Runner()
        self._moved = _move_to_loop(env.rubric)
        self.is_group = bool(env.rubric.has_group_funcs())

    def __enter__(self) -> Self:
        self._runner.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with _alarm(self.timeout_s):
                self._runner.run(self.env.teardown())
        except (Exception, _TimeUp):
            pass  # what a teardown does is no part of what is tried here
        finally:
            self._runner.close()
            for function in self._moved:
                del function.runs_in

    def try_one(self, row: Mapping[str, Any], policy: Policy) -> TrialOutcome:
        """One answer to one row."""
        return self.try_group(row, [policy])[0]

    def try_each(self, row: Mapping[str, Any], policies: Sequence[Policy]) -> list[TrialOutcome]:
        """Several answers to one row: as one group where the rubric compares rollouts, else one by one."""
        if self.is_group:
            return self.try_group(row, policies)
        return [self.try_one(row, policy) for policy in policies]

    def try_group(self, row: Mapping[str, Any], policies: Sequence[Policy]) -> list[TrialOutcome]:
        """Several answers to one row, scored together."""
        rows = [{**row, SCRIPT_KEY: index} for index in range(len(policies))]
        start = time.perf_counter()
        try:
            with _alarm(self.timeout_s):
                return self._runner.run(self._run(rows, ScriptedClient(*policies)))
        except (_TimeUp, TimeoutError):
            seconds = time.perf_counter() - start
            failed = TrialOutcome(None, error=f"no end within {self.timeout_s:g} s", seconds=seconds, is_timeout=True)
            return [failed] * len(policies)

    def run(self, coroutine: Any) -> Any:
        """Run something else in the same event loop, within the time limit."""
        with _alarm(self.timeout_s):
            return self._runner.run(coroutine)

    async def _run(self, rows: list[dict[str, Any]], client: ScriptedClient) -> list[TrialOutcome]:
        """Outcomes, and not states: a runner writes out what its task returns, conversations and all."""
        start = time.perf_counter()
        async with asyncio.timeout(self.timeout_s):
            if len(rows) == 1 and not self.is_group:
                states = [await self.env.run_rollout(rows[0], client, MODEL)]
            else:
                states = await self.env.run_group(rows, client, MODEL)
        seconds = (time.perf_counter() - start) / len(rows)
        return [_outcome(state, seconds) for state in states]


def _move_to_loop(rubric: Any) -> list[Any]:
    """Have plain reward functions run on the loop, where the timer can interrupt them; a choice of place is kept."""
    functions: list[Any] = [getattr(func, "__func__", func) for func in rubric.get_reward_funcs()]
    moved: list[Any] = [f for f in functions if inspect.isfunction(f) and not hasattr(f, "runs_in")]
    for function in moved:
        function.runs_in = "loop"
    return list({id(function): function for function in moved}.values())


def _outcome(state: Any, seconds: float) -> TrialOutcome:
    error = state.get("error")
    if error is not None:
        said = f"{type(error).__name__}: {error}"
        is_endless = isinstance(error, EndlessRollout)
        return TrialOutcome(None, state.get("metrics") or {}, said, seconds, is_endless=is_endless)
    return TrialOutcome(state["reward"], state.get("metrics") or {}, "", seconds)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Interrupt the block after so long, even inside a regular expression; a timer that was set goes on afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signum: int, frame: FrameType | None) -> None:
        raise _TimeUp

    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds + 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, remaining - (time.monotonic() - started)), interval)
