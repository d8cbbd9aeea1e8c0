"""Checks of single values of a TOML file that is read without a model class.

Parts: `text`, `flag`, `whole`, `number`. Each gives the value or raises a ValueError that says what it should be; the
reader of the file adds where it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def whole(least: int) -> Callable[[Any], int]:
    """The check for a whole number of at least `least`."""

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"a whole number of at least {least}")
        return value

    return check


def number(value: Any) -> float:
    """A number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("a number")
    return float(value)
