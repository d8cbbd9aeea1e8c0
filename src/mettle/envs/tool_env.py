"""Environments in which the model calls Python functions.

Parts: `ToolEnv`; `ToolMonitorRubric`, which counts the calls; `UnknownToolError`. Invariants: what a call gets wrong
(an unknown tool, bad JSON, a function that raises or takes too long) is told to the model as the tool's answer, unless
its type is among `stop_errors`: then it ends the rollout. What goes wrong in preparing a call (`prepare_tool_args`) is
the environment's fault and the rollout's error. Tools may be added and removed while rollouts run, from any
thread; a rollout keeps the tools that it began with.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mettle.envs.decorators import stop
from mettle.envs.errors import ToolCallError, ToolParseError
from mettle.envs.limits import call_in_thread, within
from mettle.envs.multiturn_env import MultiTurnEnv
from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.signatures import is_async, maybe_await
from mettle.envs.state import State
from mettle.envs.tool_schema import tool_of
from mettle.records.messages import Message, Messages, Tool, ToolMessage, messages_from

ToolFunction = Callable[..., Any]
CONTENT_PARTS = frozenset({"text", "image_url", "input_audio"})


def _error_text(error: Exception) -> str:
    return f"{error}"


class ToolMonitorRubric(Rubric):
    """Metrics `total_tool_calls` and `<tool>_calls`."""

    def __init__(self, tool_names: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_metric(total_tool_calls)
        for name in tool_names:
            self.add_tool_metric(name)

    def add_tool_metric(self, name: str) -> None:
        """Count the calls of one tool."""

        def calls(completion: Any) -> float:
            return float(sum(call["name"] == name for call in _calls(completion)))

        calls.__name__ = f"{name}_calls"
        self.add_metric(calls)

    def remove_tool_metric(self, name: str) -> None:
        """Count them no longer."""
        kept = [
            (func, weight)
            for func, weight in zip(self.funcs, self.weights, strict=True)
            if func.__name__ != f"{name}_calls"
        ]
        self.funcs, self.weights = [func for func, _ in kept], [weight for _, weight in kept]


class UnknownToolError(KeyError):
    """The model called a tool that is not there."""

    def __str__(self) -> str:
        return str(self.args[0])


class ToolEnv(MultiTurnEnv):
    """Functions become tools by their signature and docstring; calls run one after the other.

    A call that takes longer than `tool_timeout_seconds` is answered with that; a function that is not asynchronous then
    runs in a thread of its own, which is left to itself when it never returns.
    """

    def __init__(
        self,
        tools: Sequence[ToolFunction] | None = None,
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = _error_text,
        stop_errors: Sequence[type[Exception]] | None = None,
        *,
        tool_timeout_seconds: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, **kwargs)
        self.tool_timeout_seconds = tool_timeout_seconds
        self.tools: list[ToolFunction] = []
        self.tool_map: dict[str, ToolFunction] = {}
        self.error_formatter = error_formatter
        self.stop_errors = tuple(stop_errors or ())
        self.tool_monitor_rubric = ToolMonitorRubric()
        for tool in tools or ():
            self.add_tool(tool)
        rubrics = [self.rubric, *getattr(self.rubric, "rubrics", ())]
        if not any(isinstance(rubric, ToolMonitorRubric) for rubric in rubrics):  # they are counted already
            self.add_rubric(self.tool_monitor_rubric)

    def add_tool(self, tool: ToolFunction) -> None:
        """One more tool."""
        self._register(tool, tool_of(tool))

    def remove_tool(self, tool: ToolFunction) -> None:
        """One tool less."""
        name = next((name for name, known in self.tool_map.items() if known == tool), None)
        if name is None:
            raise ValueError(f"{getattr(tool, '__name__', tool)!r} is none of the tools {sorted(self.tool_map)}")
        self.tools.remove(tool)
        del self.tool_map[name]
        self.tool_defs = [known for known in self.tool_defs if known["name"] != name]
        self.tool_monitor_rubric.remove_tool_metric(name)

    def _register(self, function: ToolFunction, tool: Tool) -> None:
        name = tool["name"]
        if name in self.tool_map:
            raise ValueError(f"there is a tool {name!r} already; tools need different names")
        self.tools.append(function)
        self.tool_map[name] = function
        self.tool_defs = [*self.tool_defs, tool]
        self.tool_monitor_rubric.add_tool_metric(name)

    @stop
    async def no_tools_called(self, state: State) -> bool:
        """The model has answered without calling a tool."""
        trajectory = state["trajectory"]
        if not trajectory:
            return False
        last = trajectory[-1]["completion"][-1]
        return last["role"] == "assistant" and not last.get("tool_calls")

    async def call_tool(self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str, **_: Any) -> Message:
        """Call a tool; its answer as a message."""
        function = self.tool_map.get(tool_name)
        if function is None:
            raise UnknownToolError(f"there is no tool {tool_name!r}; there are {sorted(self.tool_map)}")
        result = await self._call(function, tool_name, tool_args)
        return ToolMessage(content=as_content(result), tool_call_id=tool_call_id)

    async def _call(self, function: ToolFunction, name: str, arguments: dict[str, Any]) -> Any:
        if self.tool_timeout_seconds is None:
            return await maybe_await(function, **arguments)
        async with within(self.tool_timeout_seconds, f"the tool {name}"):
            if is_async(function):
                return await function(**arguments)
            result = await call_in_thread(function, **arguments)
            return await result if isinstance(result, Awaitable) else result

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        """Run the calls of the model's last message."""
        answers: Messages = []
        for call in messages[-1].get("tool_calls") or []:
            answers.append(await self._answer(call, messages, state))
        return answers

    async def _answer(self, call: Mapping[str, Any], messages: Messages, state: State) -> Message:
        call_id = call["id"] or ""
        try:
            name, arguments = call["name"], self._read_arguments(call)
        except Exception as error:
            return self._refuse(error, ToolParseError, call_id)
        arguments = await self.prepare_tool_args(name, arguments, messages, state)
        try:
            answered = await self.call_tool(name, arguments, call_id)
        except Exception as error:
            return self._refuse(error, ToolCallError, call_id)
        message = messages_from(answered)[0]
        if message.get("role") == "tool" and not message.get("tool_call_id"):
            message["tool_call_id"] = call_id
        return message

    def _read_arguments(self, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = json.loads(call["arguments"] or "{}")
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise ValueError(f"the arguments of {call['name']} are a JSON {kind}, not an object: {arguments!r}")
        return arguments

    async def prepare_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State
    ) -> dict[str, Any]:
        """The arguments with which the tool is really called."""
        return tool_args

    def _refuse(self, error: Exception, kind: type[ToolParseError] | type[ToolCallError], call_id: str) -> Message:
        if isinstance(error, self.stop_errors):
            raise kind(f"{type(error).__name__}: {error}") from error
        return ToolMessage(content=self.error_formatter(error), tool_call_id=call_id)


def as_content(result: Any) -> Any:
    """A tool's result as message content: a list of content parts as it is, anything else as text."""
    is_parts = isinstance(result, list) and bool(result)
    if is_parts and all(isinstance(part, Mapping) and part.get("type") in CONTENT_PARTS for part in result):
        return result
    return str(result)


def total_tool_calls(completion: Any) -> float:
    """How many tools were called in a completion."""
    return float(len(_calls(completion)))


def _calls(completion: Any) -> list[Any]:
    if isinstance(completion, str):
        return []
    return [call for message in completion or [] for call in message.get("tool_calls") or []]
