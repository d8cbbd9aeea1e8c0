"""The state of one rollout: a dict that every part of an environment reads and writes.

Parts: `State`, `TrajectoryStep`, `UsageTracker` (tokens counted while it runs), `new_state`. Invariants: `prompt`,
`answer`, `info` and `example_id` live in `state["input"]` and are read and written through the state; `responses`,
`turn` and `oai_tools`, which earlier releases kept, are views; `usage` is one read-only mapping for the whole rollout,
and "nothing was counted" (None) differs from "zero was counted".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mettle.clients.dialects.chat import wire_tool
from mettle.envs.timing import RolloutTiming, TimeSpan
from mettle.processes.clock import steady_time
from mettle.records.messages import Tool, messages_from, tool_from
from mettle.records.record import Record

INPUT_FIELDS = ("prompt", "answer", "info", "example_id")
_INPUT_FIELDS = frozenset(INPUT_FIELDS)
_VIEWS = frozenset({"responses", "turn", "oai_tools", "id"})
"""What states of earlier releases held, computed from what this one holds."""
_ELSEWHERE = _INPUT_FIELDS | _VIEWS
_get, _read, _write = dict.get, dict.__getitem__, dict.__setitem__
"""A state is asked some eighty times a rollout; to look these up by `super()` took as long as they do."""


OWN_REWARD = "has_own_reward"
"""Key of a step: true where the environment rewarded it, false where scoring gave it the rollout's, else not known."""


class TrajectoryStep(Record):
    """One model call: `prompt`, `completion`, `response`, `tokens`, `reward`, `advantage`, `is_truncated`, `extras`."""

    __slots__ = ()


class State(dict[str, Any]):
    """What is known about a rollout while it runs and afterwards."""

    INPUT_FIELDS = INPUT_FIELDS

    def __getitem__(self, key: str) -> Any:
        if key in _INPUT_FIELDS:
            source = _get(self, "input")
            if source is not None and key in source:
                return source[key]
        return _read(self, key)

    def __missing__(self, key: str) -> Any:
        if key == "responses":
            return [step["response"] for step in self.get("trajectory", ())]
        if key == "turn":
            return len(self.get("trajectory", ()))
        if key == "oai_tools":
            return [wire_tool(tool) for tool in self.get("tool_defs") or ()]
        if key == "id":
            return self.get("example_id", 0)
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in _INPUT_FIELDS:
            source = _get(self, "input")
            if source is not None and key in source:
                source[key] = value
                return
        if key == "oai_tools":
            key, value = "tool_defs", [tool_from(tool) for tool in value or ()]
        _write(self, key, value)

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key) or key in _VIEWS:
            return True
        return key in _INPUT_FIELDS and key in (dict.get(self, "input") or ())

    def get(self, key: str, default: Any = None) -> Any:
        """Like `dict.get`, through the input fields."""
        if key not in _ELSEWHERE:
            return _get(self, key, default)
        try:
            return self[key]
        except KeyError:
            return default

    def stop(self, condition: str = "state_done") -> None:
        """End the rollout before its next model call."""
        self["is_completed"] = True
        self["stop_condition"] = condition

    def add_step_reward(self, reward: float) -> None:
        """Add to the reward of the latest trajectory step."""
        step = self["trajectory"][-1]
        step["reward"], step[OWN_REWARD] = (step.get("reward") or 0.0) + float(reward), True

    def total_step_reward(self) -> float:
        """Sum of the rewards of the steps that have one."""
        return float(sum(step["reward"] for step in self["trajectory"] if step.get("reward") is not None))

    @classmethod
    def for_task(cls, task: Mapping[str, Any]) -> State:
        """A state of `task` alone, for code that runs outside a rollout."""
        return new_state({"prompt": task.get("prompt") or [], **task}, None, "", {}, [])

    def record_model_timing(self, start_time: float, end_time: float) -> None:
        """Add a model call's span."""
        self["timing"].model.spans.append(TimeSpan(start_time, end_time))

    def record_generation_timing(self) -> None:
        """Generation ends here; it began with the state, unless something else was recorded."""
        generation = self["timing"].generation
        generation.start = generation.start or self["timing"].start_time
        generation.end = steady_time()

    def record_scoring_timing(self, start_time: float) -> None:
        """Scoring began at `start_time` and ends here."""
        scoring = self["timing"].scoring
        scoring.start, scoring.end = start_time, steady_time()

    def finalize(self) -> State:
        """Mark the rollout as over."""
        self["is_completed"] = True
        return self


class UsageTracker:
    """`input_tokens` and `output_tokens`, summed over a rollout's model calls."""

    __slots__ = ("_is_seen", "_totals", "usage")

    def __init__(self) -> None:
        self._totals = {"input_tokens": 0.0, "output_tokens": 0.0}
        self._is_seen = False
        self.usage: Mapping[str, float] = MappingProxyType(self._totals)

    def increment(self, input_tokens: float = 0, output_tokens: float = 0) -> None:
        """Add tokens that were used, by the policy or by any other model that the environment asked."""
        self._is_seen = True
        self._totals["input_tokens"] += input_tokens
        self._totals["output_tokens"] += output_tokens

    def increment_from_response(self, response: Any) -> None:
        """Add what a response says it used; one without counts adds nothing."""
        usage = getattr(response, "usage", None)
        if usage is not None:
            self.increment(usage.prompt_tokens or 0, usage.completion_tokens or 0)

    def snapshot(self) -> dict[str, float] | None:
        """The counts as they are, or None when no call told any."""
        return dict(self._totals) if self._is_seen else None


def new_state(
    row: Mapping[str, Any], client: Any, model: str, sampling_args: dict[str, Any], tools: list[Tool]
) -> State:
    """The state at the beginning of a rollout of `row`, which is copied and never changed."""
    source = {key: copied(value) for key, value in row.items()}
    source["prompt"] = messages_from(source.get("prompt"))
    source.setdefault("answer", "")
    if source.get("info") is None:
        source["info"] = {}
    elif isinstance(source["info"], str):
        source["info"] = json.loads(source["info"]) if source["info"] else {}
    source.setdefault("example_id", 0)
    task = row.get("task")
    tracker = UsageTracker()
    return State(
        input=source,
        task=task if isinstance(task, str) else dict(task if isinstance(task, Mapping) else source),
        client=client,
        model=model,
        sampling_args=sampling_args,
        is_completed=False,
        is_truncated=False,
        stop_condition=None,
        tool_defs=_tools_of(source["info"]) or tools,
        trajectory=[],
        trajectory_id=os.urandom(16).hex(),
        completion=None,
        reward=None,
        metrics=None,
        advantage=None,
        error=None,
        final_env_response=None,
        timing=RolloutTiming(),
        usage=tracker.usage,
        usage_tracker=tracker,
    )


def _tools_of(info: Any) -> list[Tool]:
    """The tools that a row brings along, flat or as chat completions has them."""
    if not isinstance(info, Mapping):
        return []
    given = info.get("tool_defs") or info.get("oai_tools") or []
    return [tool_from(tool) for tool in (json.loads(given) if isinstance(given, str) else given)]


def copied(value: Any) -> Any:
    """A deep copy of plain data; anything else (an image, an open game) is shared."""
    kind: Any = type(value)
    if kind is str or kind is int or kind is float or value is None:
        return value
    if isinstance(value, Record):
        made = kind.__new__(kind)
        for key, item in value.items():
            dict.__setitem__(made, key, copied(item))
        return made
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return [copied(item) for item in value]
    return value
