"""What a function wants by name, read once: reward functions, stop conditions, cleanup handlers, tools.

Parts: `Signature`, `signature_of`, `SignatureCache`, `call_by_name`, `is_async`. Invariant: `inspect.signature` runs
once per function and owner, never once per rollout.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, get_origin

GROUP_PARAMETERS = frozenset({"states", "prompts", "completions", "answers", "tasks", "infos"})
"""A reward function with any of these looks at a whole group."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters that can be given by name, and what the function looks at."""

    names: tuple[str, ...]
    takes_anything: bool
    is_group: bool

    def pick(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `available` that the function asks for."""
        if self.takes_anything:
            return dict(available)
        return {name: available[name] for name in self.names if name in available}


def signature_of(function: Callable[..., Any]) -> Signature:
    """Read the signature of `function`; a callable that has none takes nothing."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return Signature((), False, False)
    keywords = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = tuple(parameter.name for parameter in keywords)
    takes_anything = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return Signature(names, takes_anything, _is_group(names, signature.return_annotation))


def _is_group(names: tuple[str, ...], returns: Any) -> bool:
    if not GROUP_PARAMETERS.isdisjoint(names):
        return True
    if isinstance(returns, str):
        return returns.replace("typing.", "").lower().startswith("list")
    return returns is list or get_origin(returns) is list


class SignatureCache:
    """Signatures of one owner's functions. Keeps the functions alive, so an id is never read for another function."""

    def __init__(self) -> None:
        self._signatures: dict[int, tuple[Callable[..., Any], Signature]] = {}

    def __call__(self, function: Callable[..., Any]) -> Signature:
        """The signature of `function`."""
        found = self._signatures.get(id(function))
        if found is None:
            found = self._signatures[id(function)] = (function, signature_of(function))
        return found[1]


async def maybe_await(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` and wait for what it returns, where that is awaitable."""
    result = function(*args, **kwargs)
    return await result if is_awaitable(result) else result


async def call_by_name(function: Callable[..., Any], signature: Signature, available: Mapping[str, Any]) -> Any:
    """Call `function` with those of `available` that it asks for."""
    result = function(**signature.pick(available))
    return await result if is_awaitable(result) else result


def is_awaitable(value: Any) -> bool:
    """Whether `value` is to be awaited; of what an `async def` returns that is known at once."""
    return type(value) is CoroutineType or isinstance(value, Awaitable)


def is_async(function: Any) -> bool:
    """Whether calling `function` gives a coroutine; looks through partials and at `__call__` of objects."""
    while hasattr(function, "func"):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
