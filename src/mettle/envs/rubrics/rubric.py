"""Rubrics: functions that look at finished rollouts, and their weighted sum, which is the reward.

Parts: `Rubric`; `score_alone`. A function asks for what it wants by parameter name (`completion`, `answer`, `state`,
`parser`, ..., any column of the row, any class object). One with `completions`, `states`, ... or a list as its return
type looks at the whole group. Functions run one after the other, each for all rollouts of a group side by side; with
`parallelize_scoring` the functions run side by side too, and must not rely on each other. How one function is run is in
`function`, what it may return in `values`. Invariants: a function that raises, hangs or returns no finite number leaves
its rollout without a reward (`state["error"]` names it), never with 0; a rollout that failed before is not scored; each
function has its own metric, whatever its name.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mettle.envs.decorators import marked_methods
from mettle.envs.definitions import defined
from mettle.envs.errors import JudgeError
from mettle.envs.parsers.parser import Parser
from mettle.envs.rubrics.function import RewardFunction, func_name
from mettle.envs.rubrics.scoring import set_advantages
from mettle.envs.rubrics.values import Score, numbers_from
from mettle.envs.signatures import SignatureCache, call_by_name
from mettle.envs.state import State
from mettle.errors import RolloutError

logger = logging.getLogger(__name__)

RewardFunc = Callable[..., Any]
FUNC_TIMEOUT_S = 1800.0


class Rubric:
    """Reward functions with weights. Weight 0 makes a metric, which is recorded and adds nothing."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        defined(cls, "rubric")

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        parallelize_scoring: bool = False,
        func_timeout_seconds: float | None = FUNC_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        self.funcs: list[RewardFunc] = list(funcs or [])
        self.weights: list[float] = list(weights) if weights else [1.0] * len(self.funcs)
        if len(self.weights) != len(self.funcs):
            raise ValueError(f"{len(self.funcs)} functions and {len(self.weights)} weights; give one weight each")
        for weight in self.weights:
            _check_weight(weight)
        self.parallelize_scoring = parallelize_scoring
        self.func_timeout_seconds = func_timeout_seconds
        self.parser = parser or Parser()
        self.class_objects: dict[str, Any] = {"parser": self.parser}
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._signatures = SignatureCache()
        self._functions: dict[int, RewardFunction] = {}
        self._has_warned = False
        self._cleanups = marked_methods(self, "cleanup")
        self._teardowns = marked_methods(self, "teardown")

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """One more function of the reward."""
        _check_weight(weight)
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
        """The names of the metrics: the functions' own, the second of a name with `_2`, the third with `_3`."""
        return metric_names(self.funcs)

    def func_stats(self) -> dict[str, dict[str, Any]]:
        """Per function: calls, where it runs now, median and longest of its recent durations in ms."""
        return {
            name: self._function(func).stats() for name, func in zip(metric_names(self.funcs), self.funcs, strict=True)
        }

    def has_group_funcs(self) -> bool:
        """True when some function must see a whole group, or a subclass scores groups in a way of its own."""
        return scores_groups_itself(self) or any(self._function(func).is_group for func in self.funcs)

    async def score_rollout(self, state: State, *_: Any, **__: Any) -> None:
        """Set reward and metrics of one rollout. A function of the group sees a group of one, which is said once."""
        names = [] if self._has_warned else [func_name(f) for f in self.funcs if self._function(f).is_group]
        if names:
            self._has_warned = True
            self.logger.warning("%s compare a group's rollouts; scored independently they see groups of one", names)
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
            try:
                await call_by_name(handler, self._signatures(handler), {})
            except Exception as error:  # the other handlers have something to let go of, too
                self.logger.warning("teardown failed in %s", handler.__name__, exc_info=error)

    async def _score(self, states: list[State]) -> None:
        if len(self.weights) != len(self.funcs):
            raise ValueError(f"{len(self.funcs)} functions and {len(self.weights)} weights; give one weight each")
        alive = [state for state in states if state.get("error") is None]
        arguments = [self._arguments(state) for state in alive]
        # One by one they are made when it is their turn: those that a cancellation comes before would never be awaited.
        waiting = (self._column(self._function(func), alive, arguments) for func in self.funcs if alive)
        if self.parallelize_scoring:
            columns = list(await asyncio.gather(*waiting))
        else:
            columns = [await column for column in waiting]
        for state in states:
            if state.get("error") is not None:
                state["reward"], state["metrics"] = None, state.get("metrics") or {}
        names = metric_names(self.funcs)
        for index, state in enumerate(alive):
            self._record(state, names, [column[index] for column in columns])

    def _function(self, func: RewardFunc) -> RewardFunction:
        found = self._functions.get(id(func))
        if found is None or found.function is not func:
            found = self._functions[id(func)] = RewardFunction(func, self.func_timeout_seconds)
        return found

    async def _column(
        self, function: RewardFunction, states: list[State], arguments: list[dict[str, Any]]
    ) -> list[Score]:
        if function.is_group:
            return await self._group_scores(function, states)
        function.begin()
        scores = [function.start(available) for available in arguments]
        waiting = [score for score in scores if isinstance(score, Awaitable)]
        if not waiting:
            return [score for score in scores if not isinstance(score, Awaitable)]
        finished = iter([await waiting[0]] if len(waiting) == 1 else await asyncio.gather(*waiting))
        return [next(finished) if isinstance(score, Awaitable) else score for score in scores]

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

    async def _group_scores(self, function: RewardFunction, states: list[State]) -> list[Score]:
        available = {
            "prompts": [state.get("prompt") for state in states],
            "completions": [state.get("completion") for state in states],
            "answers": [state.get("answer", "") for state in states],
            "states": states,
            "tasks": [state.get("task") for state in states],
            "infos": [state.get("info", {}) for state in states],
            **self.class_objects,
        }
        values = function.start_value(available)
        values = await values if isinstance(values, Awaitable) else values
        if isinstance(values, RolloutError):
            return [values] * len(states)
        return list(numbers_from(function.name, values, len(states)))

    def _record(self, state: State, names: Sequence[str], scores: Sequence[Score]) -> None:
        reward = 0.0
        metrics: dict[str, float] = {}
        for name, weight, score in zip(names, self.weights, scores, strict=True):
            if not isinstance(score, RolloutError):
                metrics[name] = score
                reward += weight * score
                continue
            state.setdefault("reward_errors", {})[name] = str(score)
            if weight == 0:
                self.logger.warning("metric left out: %s", score)
            elif state.get("error") is None:
                state["error"] = score
        state["metrics"] = metrics
        if state.get("error") is None and not math.isfinite(reward):
            state["error"] = JudgeError(f"the weighted sum of {list(metrics)} is {reward}, which is no finite number")
        state["reward"] = None if state.get("error") is not None else reward


defined(Rubric, "rubric")


def scores_groups_itself(rubric: Rubric) -> bool:
    """True when an author overrides `score_group`."""
    return _is_authors(rubric.score_group)


def _is_authors(method: Any) -> bool:
    return not str(method.__module__).startswith("mettle.")


async def score_alone(rubric: Rubric, state: State) -> None:
    """Score one rollout by itself: as a group of one where the rubric's class says only how groups are scored."""
    if scores_groups_itself(rubric) and not _is_authors(rubric.score_rollout):
        await rubric.score_group([state])
    else:
        await rubric.score_rollout(state)


def metric_names(funcs: Sequence[RewardFunc]) -> list[str]:
    """A name of its own for each function, in order."""
    names: list[str] = []
    taken: set[str] = set()
    for func in funcs:
        name, count = func_name(func), 1
        unique = name
        while unique in taken:
            count += 1
            unique = f"{name}_{count}"
        taken.add(unique)
        names.append(unique)
    return names


def _check_weight(weight: Any) -> None:
    try:
        is_fine = math.isfinite(weight)
    except TypeError:
        is_fine = False
    if not is_fine:
        raise ValueError(f"a weight is a finite number, not {weight!r}")
