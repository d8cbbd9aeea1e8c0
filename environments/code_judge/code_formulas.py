"""Formulas of one number, told as steps: the shortest programs that there are, for policies made from nothing.

Parts: `formula_problems`. What has to be found is that a sum which is multiplied later wants parentheses, and which
number goes where; `2 * x + 6` for `(x + 3) * 2` is as good, because the tests look at what comes out alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from code_problem import Problem

STEPS = {"add {k}": "{x} + {k}", "subtract {k}": "{x} - {k}", "multiply by {k}": "{x} * {k}"}
SMALLEST, LARGEST = 2, 9
NUM_STEPS = 2


def formula_problems(rng: random.Random) -> Iterator[Problem]:
    """Problems without end; there are 576 different ones."""
    while True:
        words, code = [], "x"
        for said, formula in rng.choices(list(STEPS.items()), k=NUM_STEPS):
            k = rng.randint(SMALLEST, LARGEST)
            words.append(said.format(k=k))
            code = formula.format(x=f"({code})" if "*" in formula and " " in code else code, k=k)
        yield Problem(
            "formula",
            f"`solve(x)`: {', then '.join(words)}.",
            f"def solve(x):\n    return {code}\n",
            numbers,
            function="solve",
        )


def numbers(rng: random.Random, size: int) -> list[int]:
    """A number of about `size`."""
    return [size + rng.randint(-10, 10)]
