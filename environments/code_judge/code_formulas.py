"""Formulas of one number, told as steps: the shortest programs that there are, for policies made from nothing.

Parts: `formula_problems`, and `careless`, which writes a solution as one would who slips. What has to be found is
that a sum which is multiplied later wants parentheses, and which number goes where; `2 * x + 6` for `(x + 3) * 2` is as
good, because the tests look at what comes out alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from code_problem import Problem

STEPS = {"add {k}": "{x} + {k}", "subtract {k}": "{x} - {k}", "multiply by {k}": "{x} * {k}"}
SMALLEST, LARGEST = 2, 9
NUM_STEPS = 2
OPERATOR = re.compile(r"(?<= )[-+*](?= )")
NEEDED = re.compile(r"\((x [-+] \d)\)")
"""Parentheses that change what comes out; those around a product don't."""
SLIP_SHARE = 0.6
"""Share of careless solutions with a slip: more than half, so that imitation alone fails most problems."""


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


def careless(solution: str, rng: random.Random) -> str:
    """A formula's solution, more often than not with one slip: without its parentheses, or with a wrong operator."""
    if rng.random() >= SLIP_SHARE:
        return solution
    if NEEDED.search(solution):
        return NEEDED.sub(r"\1", solution)
    slipped = rng.choice(list(OPERATOR.finditer(solution)))
    wrong = rng.choice([sign for sign in "-+*" if sign != slipped[0]])
    return f"{solution[: slipped.start()]}{wrong}{solution[slipped.end() :]}"
