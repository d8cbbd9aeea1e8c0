"""What a class of environments or rubrics passes through when it is defined.

Parts: `adapt` (every class), `adapt_functions` (an environment's module, when it is loaded). The library's own classes
are remembered, and get the methods that they had in earlier releases. An author's class has what it overrides
translated (`overrides`). Where one calls the library's methods, perhaps the old way (`super().rollout(client, model,
prompt)`), those take both from then on. Invariants: in a process in which nobody does, no method of the library is
replaced; each is replaced at most once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType
from typing import Any

from mettle.envs.definitions import Family
from mettle.envs.legacy.methods import OlderEnvironmentMethods, OlderRubricMethods
from mettle.envs.legacy.overrides import adapt_environment, adapt_rubric
from mettle.envs.legacy.parts import (
    completed_call_of_parts,
    model_call_of_parts,
    rollout_call_of_parts,
    score_call_of_parts,
)

LIBRARY = "mettle.envs."
OLDER_METHODS: dict[str, type] = {"Environment": OlderEnvironmentMethods, "Rubric": OlderRubricMethods}
TAKING_PARTS: dict[tuple[str, str], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    ("Environment", "is_completed"): completed_call_of_parts,
    ("Environment", "get_model_response"): model_call_of_parts,
    ("MultiTurnEnv", "rollout"): rollout_call_of_parts,
    ("Rubric", "score_rollout"): score_call_of_parts,
}
"""Methods of the library that before 0.1.9 were called with a rollout's parts, and what makes each take them."""
_CALLED = frozenset({name for _, name in TAKING_PARTS} | {"score_rollouts"})
_NEWER_PARAMETERS = frozenset({"input", "state", "states"})

_library: dict[str, type] = {}
_replaced: set[tuple[str, str]] = set()
_takes_parts = False


def adapt(kind: type, family: Family) -> None:
    """Make a class callable by today's loop, and the library callable by it."""
    if kind.__module__.startswith(LIBRARY):
        _library[kind.__name__] = kind
        if kind.__name__ in OLDER_METHODS:
            _give_methods(kind, OLDER_METHODS[kind.__name__])
        if _takes_parts:
            _take_parts()
        return
    calls_older = calls_with_parts(vars(kind).values())
    (adapt_environment if family == "environment" else adapt_rubric)(kind)
    if calls_older:
        _take_parts()


def adapt_functions(module: ModuleType) -> None:
    """The same for functions of a module that are in no class: helpers that ask a model, or score."""
    if calls_with_parts(value for value in vars(module).values() if _is_own(value, module)):
        _take_parts()


def calls_with_parts(members: Iterable[Any]) -> bool:
    """Whether one of these functions calls a method of the library, and is not itself written for its later form."""
    return any(_calls_with_parts(function) for function in map(_function_of, members) if function is not None)


def _calls_with_parts(function: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(function).parameters)
    if function.__name__ in _CALLED and _NEWER_PARAMETERS & set(parameters[:2]):
        return False
    if function.__name__ == "is_completed" and "messages" in parameters:
        return True
    return bool(_names_in(function.__code__) & (_CALLED - {"is_completed"}))


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _function_of(member: Any) -> Any:
    unwrapped = getattr(member, "__func__", member)
    return unwrapped if inspect.isfunction(unwrapped) else None


def _is_own(value: Any, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _give_methods(kind: type, older: type) -> None:
    for name, member in vars(older).items():
        if inspect.isfunction(member):
            setattr(kind, name, member)


def _take_parts() -> None:
    global _takes_parts
    _takes_parts = True
    for (owner, name), taking in TAKING_PARTS.items():
        if owner in _library and (owner, name) not in _replaced:
            _replaced.add((owner, name))
            kind = _library[owner]
            setattr(kind, name, taking(vars(kind)[name]))
