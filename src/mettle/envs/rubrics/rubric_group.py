"""Several rubrics as one: rewards are added, metrics of the same name too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from mettle.envs.rubrics.rubric import RewardFunc, Rubric, score_alone, scores_groups_itself
from mettle.envs.rubrics.scoring import set_advantages
from mettle.envs.state import State


class RubricGroup(Rubric):
    """Runs its rubrics one after the other. What is added to the group goes to the first of them."""

    def __init__(self, rubrics: list[Rubric], **kwargs: Any) -> None:
        if not rubrics:
            raise ValueError("a rubric group needs at least one rubric")
        super().__init__(**kwargs)
        self.rubrics = list(rubrics)
        self.parser = self.rubrics[0].parser

    def __getattr__(self, name: str) -> Any:
        """What a rubric inside knows reads through the group that an environment made of it and its monitors."""
        if not name.startswith("_"):
            for rubric in self.__dict__.get("rubrics", ()):
                if hasattr(rubric, name):
                    return getattr(rubric, name)
        raise AttributeError(f"no rubric of the group has {name!r}")

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """One more function, in the first rubric."""
        self.rubrics[0].add_reward_func(func, weight)

    def add_class_object(self, name: str, value: Any) -> None:
        """Offer `value` under `name` to the functions of every rubric."""
        for rubric in self.rubrics:
            rubric.add_class_object(name, value)

    def get_reward_funcs(self) -> list[RewardFunc]:
        """The functions of every rubric."""
        return [func for rubric in self.rubrics for func in rubric.get_reward_funcs()]

    def get_reward_weights(self) -> list[float]:
        """The weights of every rubric."""
        return [weight for rubric in self.rubrics for weight in rubric.get_reward_weights()]

    def get_reward_func_names(self) -> list[str]:
        """The names of the metrics of every rubric; where two rubrics share one, its values are added."""
        return [name for rubric in self.rubrics for name in rubric.get_reward_func_names()]

    def func_stats(self) -> dict[str, dict[str, Any]]:
        """Those of every rubric."""
        return {name: stats for rubric in self.rubrics for name, stats in rubric.func_stats().items()}

    def has_group_funcs(self) -> bool:
        """True when some rubric must see a whole group."""
        return scores_groups_itself(self) or any(rubric.has_group_funcs() for rubric in self.rubrics)

    async def score_rollout(self, state: State, *_: Any, **__: Any) -> None:
        """Sum over the rubrics, for one rollout."""
        await self._sum([state], lambda rubric: score_alone(rubric, state))

    async def score_group(self, states: list[State], *_: Any, **__: Any) -> None:
        """Sum over the rubrics, for a group."""
        await self._sum(states, lambda rubric: rubric.score_group(states))
        set_advantages(states)

    async def cleanup(self, state: State) -> None:
        """Clean up after every rubric."""
        await super().cleanup(state)
        for rubric in self.rubrics:
            await rubric.cleanup(state)

    async def teardown(self) -> None:
        """Tear down every rubric."""
        await super().teardown()
        for rubric in self.rubrics:
            await rubric.teardown()

    async def _sum(self, states: list[State], score: Callable[[Rubric], Awaitable[None]]) -> None:
        rewards = [0.0] * len(states)
        metrics: list[dict[str, float]] = [{} for _ in states]
        before = [[(step.get("reward"), step.get("advantage")) for step in s.get("trajectory") or []] for s in states]
        for rubric in self.rubrics:
            for state in states:
                state["metrics"] = state["reward"] = None
            await score(rubric)
            for index, state in enumerate(states):
                rewards[index] += state["reward"] or 0.0
                for name, value in (state["metrics"] or {}).items():
                    metrics[index][name] = metrics[index].get(name, 0.0) + value
                for step, (reward, advantage) in zip(state.get("trajectory") or [], before[index], strict=False):
                    step["reward"], step["advantage"] = reward, advantage
        for index, state in enumerate(states):
            state["metrics"] = metrics[index]
            state["reward"] = None if state.get("error") is not None else rewards[index]
