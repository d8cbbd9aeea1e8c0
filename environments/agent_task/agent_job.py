"""What a job is: a project's files, calls of its functions that must come out right, files that must be made.

Parts: `Call`, `Step`, `Job`, `Draft`, and how values are compared. Invariant: what is expected is computed here, from
sources of this package, and never enters a machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """A function of a module, called with arguments, and what it must return."""

    module: str
    function: str
    args: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True)
class Step:
    """One call of one of the shipped agent's tools."""

    tool: str
    arguments: Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """One thing to do in a project. Goals come out wrong before anything was done, and guards right."""

    files: Mapping[str, str]
    solution: tuple[Step, ...]
    goals: tuple[Call, ...] = ()
    guards: tuple[Call, ...] = ()
    results: Mapping[str, Any] = field(default_factory=dict)
    """Files of JSON that are to be made, and what they are to mean; goals, too."""


@dataclass(frozen=True)
class Draft:
    """What is asked, known at once; the rest is worked out when it is needed."""

    instruction: str
    make: Callable[[], Job]


def is_same(found: Any, expected: Any) -> bool:
    """Whether two JSON values are equal; numbers to nine digits, and a truth value is no number."""
    if isinstance(expected, bool) or isinstance(found, bool):
        return found is expected
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(is_same(found[key], expected[key]) for key in expected)
    return type(found) is type(expected) and bool(found == expected)
