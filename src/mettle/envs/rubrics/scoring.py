"""Scoring rollouts that have ended: within a time limit, timed, and with a failure recorded on each of them.

Parts: `score_states`; `set_advantages`, what each is worth beside the others of its group. What one function may take
of the time is in `deadline`. Invariants: nothing is raised; a rollout with an error has no reward, and one without a
reward has no advantage and does not shift the others'.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from mettle.envs.errors import JudgeError, RolloutTimeout, attributed
from mettle.envs.rubrics.deadline import scored_by
from mettle.envs.state import OWN_REWARD, State
from mettle.errors import RolloutError
from mettle.processes.clock import steady_time

logger = logging.getLogger(__name__)


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
