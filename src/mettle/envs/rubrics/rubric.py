"""Rubrics: functions that look at finished rollouts, and their weighted sum, which is the reward.

Parts: `Rubric`. A function asks for what it wants by parameter name (`completion`, `answer`, `state`, `parser`, ...,
any column of the row, any class object). One with `completions`, `states`, ... or a list as its return type looks at
the whole group. Invariants: a function that raises or returns no finite number leaves its rollout without a reward
(`state["error"]` is a `JudgeError`), never with 0; a rollout that failed before is not scored.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mettle.envs.decorators import marked_methods
from mettle.envs.errors import JudgeError
from mettle.envs.legacy.overrides import adapt_rubric
from mettle.envs.parsers.parser import Parser
from mettle.envs.signatures import SignatureCache, call_by_name
from mettle.envs.state import State

logger = logging.getLogger(__name__)

RewardFunc = Callable[..., Any]
Score = float | JudgeError


class Rubric:
    """Reward functions with weights. Weight 0 makes a metric, which is recorded and adds nothing."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adapt_rubric(cls)

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        **kwargs: Any,
    ) -> None:
        self.funcs: list[RewardFunc] = list(funcs or [])
        self.weights: list[float] = list(weights) if weights else [1.0] * len(self.funcs)
        if len(self.weights) != len(self.funcs):
            raise ValueError(f"{len(self.funcs)} functions and {len(self.weights)} weights; give one weight each")
        self.parser = parser or Parser()
        self.class_objects: dict[str, Any] = {"parser": self.parser}
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._signatures = SignatureCache()
        self._cleanups = marked_methods(self, "cleanup")
        self._teardowns = marked_methods(self, "teardown")

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """One more function of the reward."""
        self.funcs.append(func)
        self.weights.append(weight)

    def add_metric(self, func: RewardFunc, weight: float = 0.0) -> None:
        """One more function that is recorded; with weight 0 it adds nothing to the reward."""
        self.add_reward_func(func, weight)

    def add_class_object(self, name: str, value: Any) -> None:
        """Offer `value` to functions that ask for `name`."""
        self.class_objects[name] = value

    @property
    def reward_funcs(self) -> list[RewardFunc]:
        """The functions."""
        return self.funcs

    @reward_funcs.setter
    def reward_funcs(self, funcs: Sequence[RewardFunc]) -> None:
        self.funcs = list(funcs)

    @property
    def reward_weights(self) -> list[float]:
        """Their weights."""
        return self.weights

    @reward_weights.setter
    def reward_weights(self, weights: Sequence[float]) -> None:
        self.weights = list(weights)

    def get_reward_funcs(self) -> list[RewardFunc]:
        """The functions, those of nested rubrics included."""
        return self.funcs

    def get_reward_weights(self) -> list[float]:
        """Their weights."""
        return self.weights

    def get_reward_func_names(self) -> list[str]:
        """Their names, which are the names of the metrics."""
        return [func_name(func) for func in self.get_reward_funcs()]

    def has_group_funcs(self) -> bool:
        """True when some function must see a whole group."""
        return any(self._signatures(func).is_group for func in self.funcs)

    async def score_rollout(self, state: State, *_: Any, **__: Any) -> None:
        """Set reward and metrics of one rollout."""
        await self._score([state])

    async def score_group(self, states: list[State], *_: Any, **__: Any) -> None:
        """Set reward, metrics and advantage (reward minus the mean of the scored) of a group's rollouts."""
        await self._score(states)
        set_advantages(states)

    async def cleanup(self, state: State) -> None:
        """Run the rubric's own `@vf.cleanup` methods."""
        for handler in self._cleanups:
            await call_by_name(handler, self._signatures(handler), {"state": state, "task": state.get("task")})

    async def teardown(self) -> None:
        """Run the rubric's own `@vf.teardown` methods."""
        for handler in self._teardowns:
            await call_by_name(handler, self._signatures(handler), {})

    async def _score(self, states: list[State]) -> None:
        alive = [state for state in states if state.get("error") is None]
        arguments = [self._arguments(state) for state in alive]
        columns: list[list[Score]] = []
        for func in self.funcs:
            if self._signatures(func).is_group:
                columns.append(await self._group_scores(func, alive))
            else:
                columns.append(await self._scores(func, arguments))
        for state in states:
            if state.get("error") is not None:
                state["reward"], state["metrics"] = None, state.get("metrics") or {}
        for index, state in enumerate(alive):
            self._record(state, [column[index] for column in columns])

    def _arguments(self, state: State) -> dict[str, Any]:
        source = state.get("input") or {}
        return {
            **source,
            "prompt": state.get("prompt"),
            "completion": state.get("completion"),
            "answer": state.get("answer", ""),
            "state": state,
            "info": state.get("info", {}),
            "task": state.get("task"),
            **self.class_objects,
        }

    async def _scores(self, func: RewardFunc, arguments: list[dict[str, Any]]) -> list[Score]:
        signature = self._signatures(func)
        scores: list[Score | None] = []
        waiting: list[tuple[int, Awaitable[Any]]] = []
        for index, available in enumerate(arguments):
            try:
                value = func(**signature.pick(available))
            except Exception as error:
                scores.append(_failure(func, error))
                continue
            if isinstance(value, Awaitable):
                waiting.append((index, value))
                scores.append(None)
            else:
                scores.append(_number(func, value))
        if len(waiting) == 1:
            scores[waiting[0][0]] = await _awaited(func, waiting[0][1])
        elif waiting:
            finished = await asyncio.gather(*(_awaited(func, value) for _, value in waiting))
            for (index, _), score in zip(waiting, finished, strict=True):
                scores[index] = score
        return [score for score in scores if score is not None]

    async def _group_scores(self, func: RewardFunc, states: list[State]) -> list[Score]:
        available = {
            "prompts": [state.get("prompt") for state in states],
            "completions": [state.get("completion") for state in states],
            "answers": [state.get("answer", "") for state in states],
            "states": states,
            "tasks": [state.get("task") for state in states],
            "infos": [state.get("info", {}) for state in states],
            **self.class_objects,
        }
        if not states:
            return []
        try:
            values = list(await call_by_name(func, self._signatures(func), available))
            if len(values) != len(states):
                raise ValueError(f"{len(values)} scores for a group of {len(states)}")
        except Exception as error:
            return [_failure(func, error) for _ in states]
        return [_number(func, value) for value in values]

    def _record(self, state: State, scores: list[Score]) -> None:
        reward = 0.0
        metrics: dict[str, float] = {}
        for func, weight, score in zip(self.funcs, self.weights, scores, strict=True):
            if not isinstance(score, JudgeError):
                metrics[func_name(func)] = score
                reward += weight * score
            elif weight == 0:
                self.logger.warning("metric left out: %s", score)
            elif state.get("error") is None:
                state["error"] = score
        state["metrics"] = metrics
        state["reward"] = None if state.get("error") is not None else reward


def func_name(func: RewardFunc) -> str:
    """The name under which a function's score is recorded."""
    return getattr(func, "__name__", None) or type(func).__name__


def set_advantages(states: Sequence[State]) -> None:
    """Reward minus the mean over the rollouts that have one; trajectory steps without a reward inherit both."""
    rewards = [state["reward"] for state in states if state.get("reward") is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    for state in states:
        reward = state.get("reward")
        state["advantage"] = None if reward is None else reward - mean
        for step in state.get("trajectory") or []:
            if step.get("advantage") is None:
                step["advantage"] = state["advantage"]
            if step.get("reward") is None:
                step["reward"] = reward


async def _awaited(func: RewardFunc, value: Awaitable[Any]) -> Score:
    try:
        return _number(func, await value)
    except Exception as error:
        return _failure(func, error)


def _number(func: RewardFunc, value: Any) -> Score:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return JudgeError(f"{func_name(func)} returned {type(value).__name__} {str(value)[:80]!r}, which is no number")
    if not math.isfinite(number):
        return JudgeError(f"{func_name(func)} returned {number}, which is no finite number")
    return number


def _failure(func: RewardFunc, error: Exception) -> JudgeError:
    if isinstance(error, JudgeError):
        return error
    made = JudgeError(f"{func_name(func)}: {type(error).__name__}: {error}")
    made.__cause__ = error
    logger.debug("reward function failed", exc_info=error)
    return made
