"""AdamW without torch's compiler.

torch's optimisers say of themselves that they are not to be compiled, for which torch imports its compiler when one is
made and when it first steps: one to two seconds of a processor, and nothing here compiles an optimiser. Parts:
`UncompiledAdamW`. Invariant: the steps are torch's own function; a torch that wraps it otherwise goes torch's way.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

_MARK = "__dynamo_disable"
"""Where torch keeps what it is to call in place of a function that is not to be compiled (`torch/_compile.py`)."""
_STEP: Callable[..., Any] = inspect.unwrap(torch.optim.AdamW.step)


class UncompiledAdamW(torch.optim.AdamW):
    """torch's AdamW."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if "torch._dynamo" not in sys.modules:
            _mark()
        super().__init__(*arguments, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step."""
        found: float | None = _STEP(self, closure)
        return found


def _mark() -> None:
    for method in vars(torch.optim.Optimizer).values():
        function = getattr(method, "__wrapped__", None)
        if function is not None and not hasattr(function, _MARK):
            setattr(function, _MARK, function)
