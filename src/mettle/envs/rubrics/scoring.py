"""Scoring rollouts that have ended: within a time limit, timed, and with a failure recorded on each of them.

Parts: `score_states`; `scored_by` and `limit_s`, until when a group is to be scored and what of that one function may
take; `set_advantages`, what each rollout is worth beside the others of its group. Whoever gives a group its time ends
it when that is over, with every reward in it; so a function that never answers, as one does that asks a judge which
hangs, is given up before. Invariants: nothing is raised; a rollout with an error has no reward, and one without a
reward has no advantage and does not shift the others'; a function that takes all of its share leaves some of the time
to those that follow it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from mettle.envs.errors import JudgeError, RolloutTimeout, attributed
from mettle.envs.state import OWN_REWARD, State
from mettle.errors import RolloutError
from mettle.processes.clock import steady_time

logger = logging.getLogger(__name__)
SHARE: Final = 0.9
"""Of what is left of a group's time, for one function."""
_ENDS_AT: ContextVar[float | None] = ContextVar("scoring_ends_at", default=None)


async def score_states(
    states: list[State],
    score: Callable[[], Awaitable[None]] | None,
    cleanup: Callable[[State], Awaitable[None]],
    *,
    timeout_s: float | None,
    ends_at: float | None = None,
) -> None:
    """Score `states` by calling `score`, then `cleanup` after each. Without `score`, a rollout's reward is 0.

    `timeout_s` ends all of it; by `ends_at` (a time of the loop) each function has been given up for itself.
    """
    start = steady_time()
    try:
        if score is None:
            for state in states:
                state["reward"], state["metrics"] = (None if state.get("error") else 0.0), {}
        else:
            with scored_by(ends_at):
                async with asyncio.timeout(timeout_s):
                    await score()
    except Exception as error:
        _fail(states, _scoring_error(error, timeout_s))
    for state in states:
        timing = state["timing"]
        timing.scoring.start, timing.scoring.end = start, steady_time()
        if state.get("error") is not None:
            state["reward"] = None
        try:
            await cleanup(state)
        except Exception as error:
            state["cleanup_error"] = f"rubric: {type(error).__name__}: {error}"
            logger.warning("rubric cleanup failed", exc_info=error)


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


def _scoring_error(error: Exception, timeout_s: float | None) -> RolloutError:
    if isinstance(error, TimeoutError) and timeout_s is not None:
        return RolloutTimeout(f"scoring took longer than {timeout_s} s")
    return attributed(error, JudgeError, "scoring")


def _fail(states: list[State], error: RolloutError) -> None:
    for state in states:
        state["error"] = state.get("error") or error
        state["metrics"] = state.get("metrics") or {}
        state["reward"] = None
    set_advantages(states)


def set_advantages(states: Sequence[MutableMapping[str, Any]]) -> None:
    """Reward minus the mean over the rollouts that have one; trajectory steps without a reward inherit both."""
    rewards = [state["reward"] for state in states if state.get("reward") is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    for state in states:
        reward = state.get("reward")
        state["advantage"] = None if reward is None else reward - mean
        for step in state.get("trajectory") or []:
            if step.get("advantage") is None:
                step["advantage"] = state["advantage"]
            if step.get("reward") is None and reward is not None:
                step["reward"], step[OWN_REWARD] = reward, False
