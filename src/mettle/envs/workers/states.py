"""Finished rollouts on the wire: states as JSON and arrays, and back.

Parts: `wired_state`, `state_from`, `wired_error`, `error_from`. Each message is sent once, however many steps saw it,
and each step's tokens only as what they add. Invariants: what comes back reads as what was sent (messages, tokens with
their sharing, timing, usage, error types and chain); a value of an environment's own that JSON does not know stays
behind, unless it is asked for as a column: then its text comes.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mettle.envs.errors import ErrorChain, error_trace
from mettle.envs.state import State, TrajectoryStep, UsageTracker
from mettle.envs.timing import RolloutTiming
from mettle.errors import RolloutError
from mettle.records.messages import (
    Message,
    Response,
    ResponseMessage,
    ResponseTokens,
    Tool,
    Usage,
    message_from,
    tool_call_from,
)

Wired = dict[str, Any]
Arrays = list["array[Any]"]
ARRAYS = (
    "new_prompt_ids", "completion_ids", "completion_logprobs", "completion_versions", "completion_mask",
    "completion_experts",
)  # fmt: skip
"""Parts of a call's tokens that travel beside the message, which holds their positions."""
APART = frozenset(
    {"client", "input", "trajectory", "timing", "usage", "usage_tracker", "error", "completion", "env_routes"}
)
"""Keys of a state that are not sent as they are."""


class RemoteCause(Exception):
    """What an error of another process was caused by; its class bears the name of the original."""


class _Table:
    """Messages by identity: each is kept once."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._positions: dict[int, int] = {}

    def positions(self, conversation: Any) -> Any:
        if isinstance(conversation, str) or conversation is None:
            return conversation
        return [self._position(message) for message in conversation]

    def _position(self, message: Any) -> int:
        found = self._positions.get(id(message))
        if found is None:
            found = self._positions[id(message)] = len(self.messages)
            self.messages.append(message)
        return found


def wired_state(state: Mapping[str, Any], arrays: Arrays, columns: Collection[str] = ()) -> Wired:
    """A finished state as a message for the wire; its numbers go into `arrays`."""
    table = _Table()
    source = dict(state["input"])
    prompt = table.positions(source.pop("prompt", None))
    known: dict[int, int] = {}
    steps = [_wired_step(step, table, known, arrays) for step in state["trajectory"]]
    completion = table.positions(state.get("completion"))
    error, tracker = state.get("error"), state.get("usage_tracker")
    usage = tracker.snapshot() if isinstance(tracker, UsageTracker) else None
    return {
        "input": _plain_items(source, columns),
        "prompt": prompt,
        "steps": steps,
        "completion": completion,
        "timing": state["timing"].to_dict(),
        "usage": usage,
        "error": wired_error(error) if isinstance(error, BaseException) else None,
        "rest": _plain_items({key: value for key, value in state.items() if key not in APART}, columns),
        "messages": [_plain(message) for message in table.messages],
    }


def state_from(wired: Wired, arrays: Arrays, client: Any = None) -> State:
    """The state that was sent with `arrays`, with `client` as its client."""
    messages = [_message(raw) for raw in wired["messages"]]

    def conversation(positions: Any) -> Any:
        return [messages[position] for position in positions] if isinstance(positions, list) else positions

    tracker = UsageTracker()
    if wired["usage"] is not None:
        tracker.increment(**wired["usage"])
    steps: list[TrajectoryStep] = []
    for raw in wired["steps"]:
        steps.append(_step(raw, conversation, steps, arrays))
    state = State(
        input={**wired["input"], "prompt": conversation(wired["prompt"])},
        client=client,
        trajectory=steps,
        completion=conversation(wired["completion"]),
        timing=RolloutTiming.from_dict(wired["timing"]),
        usage=tracker.usage,
        usage_tracker=tracker,
        error=error_from(wired["error"]) if wired["error"] else None,
    )
    for key, value in wired["rest"].items():
        dict.__setitem__(state, key, [Tool(**tool) for tool in value] if key == "tool_defs" else value)
    return state


def wired_error(error: BaseException) -> Wired:
    """An error as a message: its type by name, its boundary, its causes."""
    causes = [(type(cause).__name__, str(cause)) for cause in ErrorChain(error).errors[1:]]
    kind = getattr(error, "kind", "environment")
    return {
        "type": type(error).__name__,
        "message": str(error),
        "kind": kind,
        "causes": causes,
        "trace": error_trace(error),
    }


def error_from(wired: Wired) -> RolloutError:
    """The error that was sent: of the same class where that is one of ours, else of one with its name and boundary."""
    made: type[RolloutError] = _error_classes().get(wired["type"]) or type(
        str(wired["type"]), (RolloutError,), {"kind": str(wired["kind"])}
    )
    error = made(wired["message"])
    error.__notes__ = [f"in a worker process:\n{wired['trace']}"]
    current: BaseException = error
    for name, message in wired["causes"]:
        current.__cause__ = type(str(name), (RemoteCause,), {})(message)
        current = current.__cause__
    return error


def _error_classes() -> dict[str, type[RolloutError]]:
    found: dict[str, type[RolloutError]] = {}
    waiting = [RolloutError]
    while waiting:
        kind = waiting.pop()
        if kind.__module__.startswith("mettle."):
            found[kind.__name__] = kind
        waiting += kind.__subclasses__()
    return found


def _wired_step(step: Mapping[str, Any], table: _Table, known: dict[int, int], arrays: Arrays) -> Wired:
    tokens = step.get("tokens")
    wired = {
        "prompt": table.positions(step["prompt"]),
        "completion": table.positions(step["completion"]),
        "response": _wired_response(step.get("response")),
        "tokens": _wired_tokens(tokens, known, arrays) if isinstance(tokens, ResponseTokens) else None,
    }
    if isinstance(tokens, ResponseTokens):
        known[id(tokens)] = len(known)
    rest = {key: value for key, value in step.items() if key not in wired}
    return {**wired, "rest": _plain_items(rest, ())}


def _step(raw: Wired, conversation: Any, before: Sequence[TrajectoryStep], arrays: Arrays) -> TrajectoryStep:
    earlier = [step["tokens"] for step in before if step["tokens"] is not None]
    tokens = _tokens(raw["tokens"], earlier, arrays) if raw["tokens"] else None
    response = None
    if raw["response"] is not None:
        fields = raw["response"]
        message = ResponseMessage(**{**fields["message"], "tokens": tokens})
        if message.get("tool_calls"):
            message["tool_calls"] = [tool_call_from(call) for call in message["tool_calls"]]
        usage = Usage(**fields["usage"]) if fields["usage"] is not None else None
        response = Response(**{**fields, "usage": usage, "message": message})
    return TrajectoryStep(
        prompt=conversation(raw["prompt"]),
        completion=conversation(raw["completion"]),
        response=response,
        tokens=tokens,
        **raw["rest"],
    )


def _wired_response(response: Any) -> Wired | None:
    if not isinstance(response, Response):
        return None
    message = {key: value for key, value in response["message"].items() if key != "tokens"}
    usage = response.get("usage")
    rest = {key: value for key, value in response.items() if key not in ("message", "usage")}
    return {**_plain_items(rest, ()), "message": _plain_items(message, ()), "usage": dict(usage) if usage else None}


def _wired_tokens(tokens: ResponseTokens, known: Mapping[int, int], arrays: Arrays) -> Wired:
    parts = tokens.parts()
    follows = None if tokens.previous is None else known.get(id(tokens.previous))
    if tokens.previous is not None and follows is None:
        # It shares a prefix with a call that is no step; what is sent must stand on its own.
        parts |= {"prefix_length": 0, "new_prompt_ids": tokens.whole_prompt()}
    for name in ARRAYS:
        arrays.append(parts[name])
        parts[name] = len(arrays) - 1
    return {**parts, "follows": follows}


def _tokens(wired: Wired, earlier: Sequence[ResponseTokens], arrays: Arrays) -> ResponseTokens:
    parts = {**wired, **{name: arrays[wired[name]] for name in ARRAYS}}
    follows = parts.pop("follows")
    return ResponseTokens.from_parts(previous=None if follows is None else earlier[follows], **parts)


def _message(raw: Any) -> Any:
    return message_from(raw) if isinstance(raw, Mapping) and "role" in raw else raw


def _plain(message: Any) -> Any:
    return _plain_items(message, ()) if isinstance(message, Message) else _as_json(message)


def _plain_items(items: Mapping[str, Any], columns: Collection[str]) -> Wired:
    """The items that JSON knows, and the text of those that are asked for all the same."""
    plain: Wired = {}
    for key, value in items.items():
        try:
            plain[str(key)] = _as_json(value)
        except (TypeError, ValueError, RecursionError):
            if key in columns:
                plain[str(key)] = str(value)
    return plain


def _as_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    json.dumps(value)
    return value
