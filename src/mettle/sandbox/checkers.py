"""Checkers: a task's own code that decides, where more than one output is right.

    PythonChecker(code)   a function `check(stdin, expected, output)` returning a bool or a score, with words or without
    ProgramChecker(code)  a program in the convention of testlib: three files, and an exit code that is the verdict

A checker runs in a cell that the solution has never been in. It is trusted more than the solution, but what it reads
was written by the solution, so that its answer is data that is checked here.
Invariant: a checker that breaks is a `CheckerError`, which is no verdict; unless it accepts the expected output for the
same input, because then the output broke it, and that output is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mettle.errors import SandboxError

_MAX_MESSAGE: Final = 500
_PASSED: Final = 0
_WRONG: Final = (1, 2, 4, 8)  # wrong answer, wrong presentation, more than was asked for, less
_POINTS: Final = 7
_POINTS_TEXT: Final = re.compile(r"(?:points\s+)?([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(.*)", re.DOTALL)


class CheckerError(SandboxError):
    """A task's checker failed or gave no proper answer, so that there is no verdict."""


@dataclass(frozen=True, slots=True)
class PythonChecker:
    """Source that defines `function`. It is given three texts, or a call's arguments, expected and returned values.

    Limits left out are the pool's.
    """

    code: str
    function: str = "check"
    timeout_s: float | None = None
    memory_mb: int | None = None


@dataclass(frozen=True, slots=True)
class ProgramChecker:
    """A program that is called with the names of three files: input, output, expected.

    Exit codes: 0 is right; 1, 2, 4, 8 are wrong; 7 gives points (a number at the start of what it prints), of
    `max_points`; any other is its own failure. `files` (testlib.h, say) lie beside its source.
    """

    code: str
    language: str = "cpp"
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    max_points: float = 1.0
    timeout_s: float | None = None
    memory_mb: int | None = None


Checker = PythonChecker | ProgramChecker


class Opinion(NamedTuple):
    """What a checker says: 1 is right, 0 is wrong, and between is a part of it."""

    score: float
    message: str = ""


def read_value(value: Any) -> Opinion:
    """The opinion that a checker's function returned."""
    score, message = value if isinstance(value, tuple) and len(value) == 2 else (value, "")
    if not isinstance(message, str):
        raise CheckerError(f"the checker's message is a {type(message).__name__}; it must be text")
    return Opinion(_read_score(score, 1.0), message[:_MAX_MESSAGE])


def read_exit(exit_code: int, printed: str, max_points: float) -> Opinion:
    """The opinion that a checker's program ended with."""
    message = printed.strip()[:_MAX_MESSAGE]
    if exit_code == _PASSED:
        return Opinion(1.0, message)
    if exit_code in _WRONG:
        return Opinion(0.0, message)
    if exit_code == _POINTS and (found := _POINTS_TEXT.match(message)):
        return Opinion(_read_score(float(found[1]), max_points), found[2])
    raise CheckerError(f"the checker ended with exit code {exit_code}: {message[:200]}")


def _read_score(score: Any, most: float) -> float:
    if isinstance(score, bool):
        return float(score)
    if not isinstance(score, int | float) or not math.isfinite(score) or not 0 <= score <= most:
        raise CheckerError(f"the checker's score is {score!r}; it must be True, False or a number from 0 to {most:g}")
    return score / most
