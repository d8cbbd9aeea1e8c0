"""Several environments as one: their rows one after the other, each rolled out and scored by its own environment.

Parts: `EnvGroup`. Invariant: a row carries its route in `info["env_id"]` (a list of names in nested groups), and a row
without a known route is an error, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mettle.envs.environment import Environment
from mettle.envs.errors import EnvironmentFault
from mettle.envs.rubrics.correctness import correctness_weights, joined
from mettle.envs.rubrics.rubric import Rubric, score_alone
from mettle.envs.rubrics.scoring import set_advantages
from mettle.envs.state import State


class EnvGroupRubric(Rubric):
    """Scores each state by the rubric of the environment that it came from; metrics of the others are 0."""

    def __init__(self, env_map: Mapping[str, Environment]) -> None:
        super().__init__()
        self.env_map = env_map

    def get_reward_func_names(self) -> list[str]:
        """Names over all environments."""
        names = [name for env in self.env_map.values() for name in env.rubric.get_reward_func_names()]
        return list(dict.fromkeys(names))

    def has_group_funcs(self) -> bool:
        """True when some environment must see a whole group."""
        return any(env.rubric.has_group_funcs() for env in self.env_map.values())

    async def score_rollout(self, state: State, **_: Any) -> None:
        """Score one rollout by its own rubric."""
        await score_alone(self._routed(state).rubric, state)
        self._pad(state)

    async def score_group(self, states: list[State], **_: Any) -> None:
        """Score a group, whose rollouts are of one row and so of one environment."""
        routed: dict[int, tuple[Environment, list[State]]] = {}
        for state in states:
            if state.get("error") is not None and self._route(state) is None:
                state["reward"] = None
                continue
            env = self._routed(state)
            routed.setdefault(id(env), (env, []))[1].append(state)
        for env, members in routed.values():
            await env.rubric.score_group(members)
        for state in states:
            self._pad(state)
        set_advantages(states)

    async def cleanup(self, state: State) -> None:
        """Clean up by the rubric that scored; a rollout that belongs nowhere has nothing to clean."""
        if (env := self._route(state)) is not None:
            await env.rubric.cleanup(state)

    async def teardown(self) -> None:
        """Tear down every rubric."""
        for env in self.env_map.values():
            await env.rubric.teardown()

    def _route(self, state: State) -> Environment | None:
        env: Environment | None = (state.get("env_routes") or {}).get(id(self))
        return env

    def _routed(self, state: State) -> Environment:
        return self._route(state) or self.env_map[route_of(state.get("info"), self.env_map)]

    def _pad(self, state: State) -> None:
        state["metrics"] = {**dict.fromkeys(self.get_reward_func_names(), 0.0), **(state.get("metrics") or {})}


class EnvGroup(Environment):
    """The environments `envs`, named `env_names` (by default `env_0`, `env_1`, ...)."""

    def __init__(self, envs: Sequence[Environment], env_names: Sequence[str] | None = None, **kwargs: Any) -> None:
        if not envs:
            raise ValueError("an environment group needs at least one environment")
        names = list(env_names or (f"env_{index}" for index in range(len(envs))))
        if len(names) != len(envs) or len(set(names)) != len(names):
            raise ValueError(f"{len(envs)} environments need as many different names, not {names}")
        self.envs = list(envs)
        self.env_names = names
        self.env_map = dict(zip(names, envs, strict=True))
        has_train = any(env._splits.has("train") for env in envs)
        self.group_rubric = EnvGroupRubric(self.env_map)
        super().__init__(
            dataset=(lambda: self._joined("train")) if has_train else None,
            eval_dataset=lambda: self._joined("eval"),
            rubric=self.group_rubric,
            **kwargs,
        )

    async def rollout(
        self, input: Mapping[str, Any], client: Any, model: str, sampling_args: Mapping[str, Any] | None = None
    ) -> State:
        """A rollout by the environment that the row came from."""
        info = input.get("info") or {}
        name = route_of(info, self.env_map)
        env = self.env_map[name]
        inner = dict(input)
        if isinstance(env, EnvGroup):
            inner["info"] = {**info, "env_id": list(info["env_id"])[1:]}
        state = await env.rollout(inner, client, model, sampling_args)
        if isinstance(env, EnvGroup):
            state["info"] = {**state["info"], "env_id": info["env_id"]}
        state.setdefault("env_routes", {}).update(self._routes(info))
        return state

    async def _failed_state(self, row: Mapping[str, Any], *args: Any) -> State:
        state = await super()._failed_state(row, *args)
        try:
            state.setdefault("env_routes", {}).update(self._routes(row.get("info") or {}))
        except EnvironmentFault as error:
            state["error"] = error
        return state

    def _routes(self, info: Mapping[str, Any]) -> dict[int, Environment]:
        """The environment that each group's rubric on the way scores by, from this group down."""
        env = self.env_map[route_of(info, self.env_map)]
        routes: dict[int, Environment] = {id(self.group_rubric): env}
        if isinstance(env, EnvGroup):
            routes |= env._routes({**info, "env_id": list(info["env_id"])[1:]})
        return routes

    @property
    def pass_on(self) -> dict[str, float] | None:
        """As the environments have it, each for its own rollouts."""
        if self._pass_on is not None:
            return correctness_weights(self.rubric, self._pass_on)
        return joined([env.pass_on for env in self.envs], [env.rubric for env in self.envs])

    @pass_on.setter
    def pass_on(self, names: str | Sequence[str] | None) -> None:
        self._pass_on = names

    def get_env_for_name(self, name: str) -> Environment:
        """The environment of that name.

        Raises: ValueError when there is none.
        """
        if name not in self.env_map:
            raise ValueError(f"there is no environment {name!r} in the group; there are {sorted(self.env_map)}")
        return self.env_map[name]

    def set_max_seq_len(self, max_seq_len: int | None) -> None:
        """Of every environment."""
        self._set_all("set_max_seq_len", max_seq_len)

    def set_score_rollouts(self, score_rollouts: bool) -> None:
        """Of every environment."""
        self._set_all("set_score_rollouts", score_rollouts)

    def set_max_total_completion_tokens(self, max_total_completion_tokens: int) -> None:
        """Of every environment."""
        self._set_all("set_max_total_completion_tokens", max_total_completion_tokens)

    def set_concurrency(self, concurrency: int) -> None:
        """Of every environment."""
        self._set_all("set_concurrency", concurrency)

    def _set_all(self, setter: str, value: Any) -> None:
        getattr(super(), setter)(value)
        for env in self.envs:
            getattr(env, setter)(value)

    def get_env_for_task(self, task: str) -> Environment:
        """The environment of that name."""
        return self.env_map[task]

    async def teardown(self) -> None:
        """Tear down every environment."""
        await asyncio.gather(*(env.teardown() for env in self.envs))

    def _joined(self, split: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for name, env in self.env_map.items():
            source = env.get_dataset() if split == "train" else env.get_eval_dataset()
            for row in source:
                info = row.get("info") or {}
                info = json.loads(info) if isinstance(info, str) else dict(info)
                inner = info.get("env_id") if isinstance(env, EnvGroup) else None
                info["env_id"] = [name, *(inner if isinstance(inner, list) else [inner])] if inner else name
                rows.append({**row, "info": info, "example_id": len(rows)})
        return rows


def route_of(info: Any, env_map: Mapping[str, Environment]) -> str:
    """The name of the environment that a row came from.

    Raises: EnvironmentFault when the row names none, or one that is not in the group.
    """
    route = info.get("env_id") if isinstance(info, Mapping) else None
    name = route[0] if isinstance(route, list) and route else route
    if name not in env_map:
        raise EnvironmentFault(f"a row is routed to {name!r}; the group has {sorted(env_map)}")
    return str(name)
