"""What a problem is: words, a solution, and how its tests are made.

Invariant: what a test expects is what the solution returns; the solutions are this package's own code, run here, while
a model's code is only ever run in the sandbox.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

NUM_TESTS = 10
SIZES = (0, 1, 2, 3, 5, 8, 12, 20, 40, 80)
"""Sizes of the tests' inputs, from the empty one upwards."""


@dataclass(frozen=True)
class Problem:
    """A statement and the source that solves it. With `function`, arguments are made; else lines of standard input."""

    family: str
    statement: str
    solution: str
    make_input: Callable[[random.Random, int], Any]
    function: str | None = None

    def tests(self, rng: random.Random) -> list[dict[str, Any]]:
        """Tests as data, the small ones first."""
        return [self._call_test(rng, size) if self.function else self._stdio_test(rng, size) for size in SIZES]

    def _call_test(self, rng: random.Random, size: int) -> dict[str, Any]:
        args = self.make_input(rng, size)
        names: dict[str, Any] = {}
        exec(self.solution, names)
        return {"function": self.function, "args": args, "expected": names[self.function](*copy.deepcopy(args))}

    def _stdio_test(self, rng: random.Random, size: int) -> dict[str, Any]:
        stdin = self.make_input(rng, size)
        lines = iter(stdin.splitlines())
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(self.solution, {"input": lambda: next(lines), "__name__": "__main__"})
        return {"stdin": stdin, "expected": printed.getvalue()}


def show(test: dict[str, Any]) -> str:
    """A test as it stands in a statement."""
    if "function" in test:
        return f"{test['function']}({', '.join(map(repr, test['args']))}) == {test['expected']!r}"
    return f"Input:\n{test['stdin'].rstrip()}\nOutput:\n{test['expected'].rstrip()}"
