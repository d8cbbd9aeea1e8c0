"""Calls that pass a rollout's parts one by one, as verifiers did before 0.1.8 put them into a state.

Parts: `state_after` (what an old rollout gave back, as a state), `score_parts` and `take_scores` (what an old rubric is
called with, and what it gave back), `model_call_of_parts`, `rollout_call_of_parts`, `completed_call_of_parts`,
`score_call_of_parts` (the library's own methods, for authors who call them the old way).
Invariant: each of them is a function between the two shapes and knows nothing of who calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from mettle.clients.factory import client_from
from mettle.envs.author_records import RolloutScore
from mettle.envs.legacy.responses import as_response
from mettle.envs.state import State, TrajectoryStep, new_state
from mettle.records.messages import messages_from, tool_from

Method = Callable[..., Any]

_OWN_KEYS = frozenset({"prompt", "completion", "answer", "info", "task", "responses", "turn", "timing", "id"})


async def state_after(env: Any, state: State, finished: Any) -> None:
    """Put what an old rollout gave back, `(completion, its own state)`, into `state`."""
    if isinstance(finished, Mapping):
        if finished is not state:
            state.update(finished)
        return
    completion, theirs = finished
    state.update({key: value for key, value in theirs.items() if key not in _OWN_KEYS})
    if not state["trajectory"]:
        await _rebuild_trajectory(env, state, messages_from(completion), theirs.get("responses") or [])
    state["completion"] = messages_from(completion)
    state["is_completed"] = True
    state["stop_condition"] = state.get("stop_condition") or "rollout_returned"
    state["is_truncated"] = any(step["is_truncated"] for step in state["trajectory"])


async def _rebuild_trajectory(env: Any, state: State, completion: list[Any], answers: Sequence[Any]) -> None:
    """One step for each of the model's answers; its prompt is what was said before it."""
    turns = [index for index, message in enumerate(completion) if message["role"] == "assistant"]
    for index, answer in zip(turns, answers, strict=False):
        response = as_response(answer)
        step = TrajectoryStep(
            prompt=[*state["prompt"], *completion[:index]],
            completion=[completion[index]],
            response=response,
            tokens=response.message.tokens,
            reward=None,
            advantage=None,
            is_truncated=bool(response.message.is_truncated),
            trajectory_id=state["trajectory_id"],
            extras={},
        )
        await env.add_trajectory_step(state, step)


def score_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """What an old `score_rollout` is called with."""
    return {
        "prompt": state["prompt"],
        "completion": state["completion"],
        "answer": state["answer"],
        "state": state,
        "task": state["task"],
        "info": state["info"],
    }


def take_scores(states: Sequence[Any], rewards: Sequence[float], metrics: Mapping[str, Sequence[float]]) -> None:
    """Write an old rubric's scores into the states."""
    for index, state in enumerate(states):
        state["reward"] = float(rewards[index])
        state["metrics"] = {name: float(values[index]) for name, values in metrics.items()}


def model_call_of_parts(method: Method) -> Method:
    """`get_model_response`, which before 0.1.9 was called with client, model and prompt, and without a state."""
    order = ("client", "model", "prompt", "oai_tools", "sampling_args", "message_type")

    @wraps(method)
    async def get_model_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (args and isinstance(args[0], Mapping)) or "state" in kwargs:
            if "oai_tools" in kwargs:
                kwargs["tool_defs"] = [tool_from(tool) for tool in kwargs.pop("oai_tools") or []] or None
            return await method(self, *args, **kwargs)
        given = {**dict(zip(order, args, strict=False)), **kwargs}
        sampling_args = {**self.sampling_args, **(given.get("sampling_args") or {})}
        tools = [tool_from(tool) for tool in given.get("oai_tools") or []]
        state = new_state(
            {"prompt": given["prompt"]}, client_from(given["client"]), given["model"], sampling_args, tools
        )
        return await method(self, state, state["prompt"])

    return get_model_response


def rollout_call_of_parts(method: Method) -> Method:
    """`rollout`, which before 0.1.8 was called with client, model, prompt, ... and gave `(completion, state)`."""
    order = ("client", "model", "prompt", "answer", "task", "info", "sampling_args")

    @wraps(method)
    async def rollout(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (args and isinstance(args[0], Mapping)) or "input" in kwargs:
            return await method(self, *args, **kwargs)
        given = {**dict(zip(order, args, strict=False)), **kwargs}
        row = {name: given[name] for name in ("prompt", "answer", "task", "info") if given.get(name) is not None}
        state = await method(self, row, client_from(given["client"]), given["model"], given.get("sampling_args"))
        return state["completion"], state

    return rollout


def completed_call_of_parts(method: Method) -> Method:
    """`is_completed`, which before 0.1.8 was called with the messages and then the state."""

    @wraps(method)
    async def is_completed(self: Any, state: Any, older_state: Any = None, **kwargs: Any) -> bool:
        done: bool = await method(self, state if older_state is None else older_state, **kwargs)
        return done

    return is_completed


def score_call_of_parts(method: Method) -> Method:
    """`score_rollout`, which before 0.1.8 was called with prompt, completion, ... and gave a `RolloutScore`."""
    order = ("prompt", "completion", "answer", "state", "task", "info")

    @wraps(method)
    async def score_rollout(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (args and isinstance(args[0], Mapping)) or "completion" not in {*order[1 : len(args)], *kwargs}:
            return await method(self, *args, **kwargs)
        given = {**dict(zip(order, args, strict=False)), **kwargs}
        state = given["state"]
        state["completion"] = given["completion"]
        await method(self, state)
        if state.get("error") is not None:
            raise state["error"]
        return RolloutScore(reward=state["reward"], metrics=state["metrics"])

    return score_rollout
