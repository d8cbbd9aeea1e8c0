"""What a reward function may return, and what becomes of the rest.

Parts: `Score`, `Overrun`, `number_from`, `numbers_from` (of a group), `failure_of`. A score is a finite
number: an int, a float, a bool, a Fraction, or a numpy or torch scalar. Invariant: text, None, lists, NaN and infinity
are no scores; they become an error that names the function, never a 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sized
from typing import Any

from mettle.clients.errors import one_line
from mettle.errors import JudgeError, RolloutError

logger = logging.getLogger(__name__)

Score = float | RolloutError
FAILURES = (Exception, SystemExit)
"""What a function may raise without ending more than its own rollout; `sys.exit()` inside a grader is common."""


class Overrun(Exception):
    """A call was given up because its time was over; not a TimeoutError, which a function may raise itself."""


def number_from(name: str, value: Any) -> Score:
    """`value`, which the function `name` returned, as a finite float, or the reason why it is none."""
    if type(value) is float:
        number = value
    elif value is None or isinstance(value, str | bytes | bytearray) or _is_many(value):
        return _no_number(name, value)
    else:
        try:
            number = float(value)
        except Exception:  # whatever an unknown type's __float__ raises, it is no number
            return _no_number(name, value)
    if not math.isfinite(number):
        return JudgeError(f"{name} returned {number}, which is no finite number")
    return number


def numbers_from(name: str, values: Any, size: int) -> list[Score]:
    """One score for each of a group's `size` rollouts; a value that cannot be shared out fails all of them."""
    try:
        if isinstance(values, str | bytes | bytearray | Mapping):
            raise ValueError(f"returned {type(values).__name__}, not a list of scores")
        listed = list(values)
        if len(listed) != size:
            raise ValueError(f"{len(listed)} scores for a group of {size}")
    except Exception as error:
        return [failure_of(name, error) for _ in range(size)]
    return [number_from(name, value) for value in listed]


def failure_of(name: str, error: BaseException) -> RolloutError:
    """What `name` raised, as the error of the rollout that it was scoring: one line that names the function.

    A failure that was attributed already, to a sandbox or an endpoint, keeps its kind; any other is a `JudgeError`.
    """
    is_attributed = isinstance(error, RolloutError)
    text = str(error) if is_attributed else f"{type(error).__name__}: {error}"
    kind = type(error) if isinstance(error, RolloutError) else JudgeError
    try:
        made = kind(one_line(text if is_attributed and text.startswith(name) else f"{name}: {text}"))
    except TypeError:  # an environment's own kind, made from something else than a message
        made = JudgeError(one_line(f"{name}: {type(error).__name__}: {error}"))
    made.__cause__ = error
    logger.debug("reward function failed", exc_info=error)
    return made


def _is_many(value: Any) -> bool:
    ndim = getattr(value, "ndim", None)
    if isinstance(ndim, int):
        return ndim > 0
    return isinstance(value, Sized)


def _no_number(name: str, value: Any) -> JudgeError:
    try:
        shown = one_line(repr(value), 80)
    except Exception as error:
        shown = f"(its repr raised {type(error).__name__})"
    return JudgeError(f"{name} returned {type(value).__name__} {shown}, which is no number")
