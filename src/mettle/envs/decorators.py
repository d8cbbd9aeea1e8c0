"""Marks on the methods of an environment or a rubric: when to stop, what to clean up, what scores.

Parts: `stop`, `cleanup`, `teardown`, which environments act on; `setup`, `update`, `metric`, `reward`, `advantage`,
which only mark, as they did in verifiers; `discover_decorated` finds what is marked. Invariant: higher priority runs
first, ties go by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

Function = TypeVar("Function", bound=Callable[..., Any])


def _marker(name: str, function: Any, **details: Any) -> Any:
    """Mark `function`, or, without one, give the decorator that will."""

    def mark(marked: Function) -> Function:
        setattr(marked, name, True)
        for detail, value in details.items():
            setattr(marked, f"{name}_{detail}", value)
        return marked

    return mark(function) if function is not None else mark


@overload
def stop(function: Function, priority: int = ...) -> Function: ...
@overload
def stop(function: None = None, priority: int = ...) -> Callable[[Function], Function]: ...
def stop(function: Any = None, priority: int = 0) -> Any:
    """A stop condition: asked before each model call; the rollout ends when it returns True."""
    return _marker("stop", function, priority=priority)


@overload
def cleanup(function: Function, priority: int = ..., stage: str = ...) -> Function: ...
@overload
def cleanup(function: None = None, priority: int = ..., stage: str = ...) -> Callable[[Function], Function]: ...
def cleanup(function: Any = None, priority: int = 0, stage: str = "rollout") -> Any:
    """Run after each rollout, whatever became of it."""
    return _marker("cleanup", function, priority=priority, stage=stage)


@overload
def teardown(function: Function, priority: int = ...) -> Function: ...
@overload
def teardown(function: None = None, priority: int = ...) -> Callable[[Function], Function]: ...
def teardown(function: Any = None, priority: int = 0) -> Any:
    """Run once, when the environment is closed."""
    return _marker("teardown", function, priority=priority)


def setup(function: Any = None, priority: int = 0) -> Any:
    """A mark for what prepares a rollout."""
    return _marker("setup", function, priority=priority)


def update(function: Any = None, priority: int = 0, stage: str = "rollout") -> Any:
    """A mark for what changes the state."""
    return _marker("update", function, priority=priority, stage=stage)


def metric(function: Any = None, priority: int = 0, stage: str = "rollout") -> Any:
    """A mark for what is measured."""
    return _marker("metric", function, priority=priority, stage=stage)


def reward(function: Any = None, weight: float = 1.0, priority: int = 0, stage: str = "rollout") -> Any:
    """A mark for what is rewarded."""
    return _marker("reward", function, weight=weight, priority=priority, stage=stage)


def advantage(function: Any = None, priority: int = 0) -> Any:
    """A mark for what computes a group's advantages."""
    return _marker("advantage", function, priority=priority, stage="group")


def marked_methods(owner: Any, name: str) -> list[Callable[..., Any]]:
    """The bound methods of `owner` that carry the mark `name`, in the order in which they run."""
    found: dict[str, int] = {}
    for kind in type(owner).__mro__:
        for attribute in vars(kind):
            function = getattr(type(owner), attribute, None)
            if callable(function) and getattr(function, name, False) is True:
                found[attribute] = getattr(function, f"{name}_priority", 0)
    ordered = sorted(found, key=lambda attribute: (-found[attribute], attribute))
    return [getattr(owner, attribute) for attribute in ordered]


discover_decorated = marked_methods
