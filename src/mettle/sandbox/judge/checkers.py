"""What a checker answers: a task's own code that decides, where more than one output is right.

A checker runs in a cell that the solution has never been in. It is trusted more than the solution, but what it reads
was written by the solution, so that its answer is data that is checked here.
Invariant: a checker that breaks is a `CheckerError`, which is no verdict; unless it accepts the expected output for the
same input, because then the output broke it, and that output is wrong.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from mettle.errors import SandboxError

_MAX_MESSAGE: Final = 500
_MOST_SHOWN: Final = 10**18
_PASSED: Final = 0
_WRONG: Final = (1, 2, 4, 8)  # wrong answer, wrong presentation, more than was asked for, less
_POINTS: Final = 7
_POINTS_TEXT: Final = re.compile(r"(?:points\s+)?([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(.*)", re.DOTALL)


class CheckerError(SandboxError):
    """A task's checker failed or gave no proper answer, so that there is no verdict."""


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
    if not isinstance(score, int | float) or not 0 <= score <= most:  # which nan and infinity are not either
        shown = "a number of many digits" if isinstance(score, int) and abs(score) >= _MOST_SHOWN else repr(score)[:80]
        raise CheckerError(f"the checker's score is {shown}; it must be True, False or a number from 0 to {most:g}")
    return score / most
