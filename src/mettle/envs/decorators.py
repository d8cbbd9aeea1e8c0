"""Marks on an environment's or a rubric's methods: when to stop, what to clean up.

Parts: `stop`, `cleanup`, `teardown`, `marked_methods`. Invariant: higher priority runs first, ties go by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

Function = TypeVar("Function", bound=Callable[..., Any])


def _mark(name: str, function: Function, priority: int) -> Function:
    setattr(function, name, True)
    setattr(function, f"{name}_priority", priority)
    return function


@overload
def stop(function: Function, *, priority: int = 0) -> Function: ...
@overload
def stop(function: None = None, *, priority: int = 0) -> Callable[[Function], Function]: ...
def stop(function: Any = None, *, priority: int = 0) -> Any:
    """A stop condition: asked before each model call; the rollout ends when it returns True."""
    return _mark("stop", function, priority) if function else lambda f: _mark("stop", f, priority)


@overload
def cleanup(function: Function, *, priority: int = 0) -> Function: ...
@overload
def cleanup(function: None = None, *, priority: int = 0) -> Callable[[Function], Function]: ...
def cleanup(function: Any = None, *, priority: int = 0) -> Any:
    """Run after each rollout, whatever became of it."""
    return _mark("cleanup", function, priority) if function else lambda f: _mark("cleanup", f, priority)


@overload
def teardown(function: Function, *, priority: int = 0) -> Function: ...
@overload
def teardown(function: None = None, *, priority: int = 0) -> Callable[[Function], Function]: ...
def teardown(function: Any = None, *, priority: int = 0) -> Any:
    """Run once, when the environment is closed."""
    return _mark("teardown", function, priority) if function else lambda f: _mark("teardown", f, priority)


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
