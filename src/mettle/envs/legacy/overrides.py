"""Methods that environments and rubrics of 0.1.2 to 0.1.9 override with the signatures of their release.

Parts: `adapt_environment`, `adapt_rubric`, which an author's class passes through once, when it is defined. A method
written for an older signature is replaced by one that takes today's and calls it. Invariants: what a class does not
override is not touched; a replaced method still takes its own signature, so that `super()` calls between the author's
classes work; the loop itself knows nothing of all this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from mettle.envs.errors import JudgeError, attributed
from mettle.envs.legacy.asynchrony import NullAsyncContext
from mettle.envs.legacy.parts import score_parts, state_after, take_scores
from mettle.envs.legacy.responses import as_response
from mettle.envs.rubrics.scoring import set_advantages
from mettle.envs.signatures import maybe_await
from mettle.records.messages import messages_from

Method = Callable[..., Any]

_AWAITED = ("env_response", "get_prompt_messages", "setup_state", "is_completed", "rollout", "get_model_response")


def adapt_environment(kind: type) -> None:
    """Make the older overrides of an environment class callable by today's loop."""
    for name in _AWAITED:
        method = vars(kind).get(name)
        if inspect.isfunction(method) and not inspect.iscoroutinefunction(method):
            setattr(kind, name, _awaitable(method))
    if "get_prompt_messages" in vars(kind):
        _replace(kind, "get_prompt_messages", _giving_messages)
    if _asks_for(kind, "is_completed", "messages"):
        _adapt_is_completed(kind)
    if _asks_for(kind, "rollout", "prompt"):
        _replace(kind, "rollout", _rollout_of_parts)
    if _first_parameter(kind, "get_model_response") == "client":
        _replace(kind, "get_model_response", _model_response_of_parts)
    if "get_model_response" in vars(kind):
        _replace(kind, "get_model_response", _giving_a_response)
    if _asks_for(kind, "update_tool_args") and not _asks_for(kind, "update_tool_args", "tool_name"):
        _replace(kind, "update_tool_args", _tool_args_without_name)


def adapt_rubric(kind: type) -> None:
    """Make the older overrides of a rubric class callable by today's scoring."""
    for name in ("score_rollout", "score_group"):
        if _asks_for(kind, name, "score_sem"):
            _replace(kind, name, _without_semaphore)
    rubric: Any = kind
    if _asks_for(kind, "score_rollout", "completion"):
        _replace(kind, "score_rollout", _score_of_parts)
        rubric.score_group = _score_one_by_one
    if inspect.isfunction(vars(kind).get("score_rollouts")):
        rubric.score_group = _group_score_of_parts(vars(kind)["score_rollouts"])
        rubric.has_group_funcs = lambda self: True


def _asks_for(kind: type, name: str, *parameters: str) -> bool:
    method = vars(kind).get(name)
    if not inspect.isfunction(method):
        return False
    return set(parameters) <= set(inspect.signature(method).parameters)


def _first_parameter(kind: type, name: str) -> str | None:
    method = vars(kind).get(name)
    names = list(inspect.signature(method).parameters) if inspect.isfunction(method) else []
    return names[1] if len(names) > 1 else None


def _replace(kind: type, name: str, adapter: Callable[[Method], Method]) -> None:
    method = vars(kind)[name]
    adapted = adapter(method)
    for mark, value in vars(method).items():
        setattr(adapted, mark, value)
    adapted.__name__, adapted.__doc__, adapted.__module__ = name, method.__doc__, method.__module__
    setattr(kind, name, adapted)


def _awaitable(method: Method) -> Method:
    @wraps(method)
    async def awaitable(*args: Any, **kwargs: Any) -> Any:
        return await maybe_await(method, *args, **kwargs)

    return awaitable


def _giving_messages(method: Method) -> Method:
    """`get_prompt_messages` may give plain dicts or text."""

    async def get_prompt_messages(self: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return messages_from(await method(self, state, *args, **kwargs))

    return get_prompt_messages


def _giving_a_response(method: Method) -> Method:
    """`get_model_response` may give what the openai package does."""

    async def get_model_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        return as_response(await method(self, *args, **kwargs))

    return get_model_response


def _adapt_is_completed(kind: Any) -> None:
    """`is_completed(messages, state)` was asked after the model's turn, and again after the environment's."""
    asked: Method = vars(kind)["is_completed"]
    own_prompt: Method | None = vars(kind).get("get_prompt_messages")
    standard = next(method for method in _inherited(kind, "is_completed") if not hasattr(method, "asks_older"))

    async def is_completed(self: Any, state: Any, older_state: Any = None, **kwargs: Any) -> bool:
        if older_state is not None:
            return bool(await asked(self, state, older_state, **kwargs))
        if await standard(self, state):
            return True
        return bool(await asked(self, _conversation(state), state))

    async def get_prompt_messages(self: Any, state: Any) -> Any:
        prompt = await (own_prompt(self, state) if own_prompt else super(kind, self).get_prompt_messages(state))
        if state["trajectory"] and state.get("final_env_response") is None:
            said = prompt[len(_conversation(state)) :]
            if said and await self.is_completed(prompt, state):
                state["final_env_response"] = said
        return prompt

    is_completed.asks_older = True  # type: ignore[attr-defined]
    get_prompt_messages.asks_older = True  # type: ignore[attr-defined]
    kind.is_completed = is_completed
    if own_prompt or not any(hasattr(method, "asks_older") for method in _inherited(kind, "get_prompt_messages")):
        kind.get_prompt_messages = get_prompt_messages


def _inherited(kind: type, name: str) -> list[Method]:
    """The methods `name` of the bases, the nearest first."""
    return [vars(base)[name] for base in kind.__mro__[1:] if name in vars(base)]


def _conversation(state: Mapping[str, Any]) -> list[Any]:
    if not state["trajectory"]:
        return list(state["prompt"])
    last = state["trajectory"][-1]
    return [*last["prompt"], *last["completion"]]


def _rollout_of_parts(method: Method) -> Method:
    """`rollout(client, model, prompt, answer, task, info, sampling_args)`, which gave `(completion, state)`."""
    accepted = inspect.signature(method).parameters
    takes_anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())

    async def rollout(self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, Mapping) or "prompt" not in input:
            return await method(self, input, *args, **kwargs)
        state = await self.init_state(input, *args, **kwargs)
        given = {
            "prompt": state["prompt"],
            "answer": state["answer"],
            "info": state["info"],
            "task": state["task"] if isinstance(state["task"], str) else "default",
            "sampling_args": state["sampling_args"],
        }
        chosen = given if takes_anything else {name: value for name, value in given.items() if name in accepted}
        finished = await method(self, state["client"], state["model"], **chosen)
        await state_after(self, state, finished)
        return state

    return rollout


def _model_response_of_parts(method: Method) -> Method:
    """`get_model_response(client, model, prompt, oai_tools, sampling_args, message_type)`."""

    async def get_model_response(self: Any, state: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, Mapping):
            return await method(self, state, prompt, *args, **kwargs)
        from mettle.clients.dialects.chat import wire_tool

        tools = [wire_tool(tool) for tool in state.get("tool_defs") or []]
        return await method(
            self,
            state["client"],
            state["model"],
            prompt,
            oai_tools=tools or None,
            sampling_args=state["sampling_args"],
            message_type=self.message_type,
        )

    return get_model_response


def _tool_args_without_name(method: Method) -> Method:
    """`update_tool_args(tool_args, messages, state)`, as it was before 0.1.4."""

    def update_tool_args(self: Any, tool_name: str, tool_args: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, tool_args, *args, **kwargs)

    return update_tool_args


def _without_semaphore(method: Method) -> Method:
    """`score_rollout(state, score_sem)` and `score_group(states, score_sem)`, as they were in 0.1.8 and 0.1.9."""

    async def score(self: Any, state: Any, score_sem: Any = None, **_: Any) -> Any:
        return await method(self, state, score_sem or NullAsyncContext())

    return score


def _score_of_parts(method: Method) -> Method:
    """`score_rollout(prompt, completion, answer, state, task, info)`, which gave a `RolloutScore`."""

    async def score_rollout(self: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, Mapping) or args:
            return await method(self, state, *args, **kwargs)
        score = await maybe_await(method, self, **score_parts(state))
        take_scores([state], [score["reward"]], {name: [value] for name, value in score["metrics"].items()})
        return None

    return score_rollout


async def _score_one_by_one(self: Any, states: list[Any], *_: Any, **__: Any) -> None:
    """A group scored by an older `score_rollout`, which never saw more than one."""
    for state in states:
        if state.get("error") is None:
            try:
                await self.score_rollout(state)
            except Exception as error:
                state["error"], state["reward"] = attributed(error, JudgeError, "score_rollout"), None
    set_advantages(states)


def _group_score_of_parts(method: Method) -> Method:
    """`score_rollouts(prompts, completions, answers, states, tasks, infos)`, which gave `RolloutScores`."""

    async def score_group(self: Any, states: list[Any], *_: Any, **__: Any) -> None:
        parts = [score_parts(state) for state in states if state.get("error") is None]
        if not parts:
            return
        columns = {f"{name}s": [part[name] for part in parts] for name in parts[0]}
        scores = await maybe_await(method, self, **columns)
        take_scores(columns["states"], scores["reward"], scores["metrics"])
        set_advantages(states)

    return score_group
