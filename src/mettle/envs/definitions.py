"""What is done with a class of environments or rubrics when it is defined: the door for habits of older releases.

Parts: `adapt_with` (whoever adapts), `defined` (what `Environment` and `Rubric` say of themselves and of each class
below them). Invariant: adaptation happens once a class, so that a rollout of a class that needs none pays nothing and
the library knows nothing of who adapts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

Family = Literal["environment", "rubric"]
Kind = TypeVar("Kind", bound=type[Any])

_adapters: list[Callable[[type, Family], None]] = []


def adapt_with(adapter: Callable[[type, Family], None]) -> None:
    """Have `adapter` see each class that is defined from now on."""
    _adapters.append(adapter)


def defined(kind: Kind, family: Family) -> Kind:
    """Let the adapters see a class that has just been defined."""
    for adapter in _adapters:
        adapter(kind, family)
    return kind
