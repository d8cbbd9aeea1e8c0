"""Rows in the form of well-known datasets, made here: word problems, algebra, multiple choice, small programs.

Parts: `offline_rows`, one maker per form. Invariants: nothing is taken from any dataset; the answer is computed from
the same numbers as the question; the same name and seed always give the same rows, and no question twice.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

Made = tuple[str, str]
Maker = Callable[[random.Random], Made]
LETTERS = "ABCDEFGHIJ"

NAMES = ("Aino", "Bram", "Chidi", "Dara", "Elif", "Farid", "Greta", "Hana", "Ivo", "Juno")
THINGS = ("marbles", "postcards", "apples", "stamps", "books", "shells", "pencils", "tickets")
# fmt: off
ELEMENTS = [
    "hydrogen", "helium", "lithium", "beryllium", "boron", "carbon", "nitrogen", "oxygen", "fluorine", "neon",
    "sodium", "magnesium", "aluminium", "silicon", "phosphorus", "sulfur", "chlorine", "argon", "potassium",
    "calcium", "scandium", "titanium", "vanadium", "chromium", "manganese", "iron", "cobalt", "nickel", "copper",
    "zinc",
]
# fmt: on
UNITS = (
    ("force", "newton"),
    ("energy", "joule"),
    ("power", "watt"),
    ("pressure", "pascal"),
    ("electric charge", "coulomb"),
    ("voltage", "volt"),
    ("resistance", "ohm"),
    ("frequency", "hertz"),
    ("magnetic flux density", "tesla"),
    ("capacitance", "farad"),
)


def offline_rows(name: str, num: int, rng: random.Random) -> list[dict[str, Any]]:
    """`num` rows of `question` and `answer` in the form of the dataset `name`."""
    make = _MAKERS[name]
    rows: dict[str, str] = {}
    while len(rows) < num:
        question, answer = make(rng)
        rows.setdefault(question, answer)
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


def _word_problem(rng: random.Random) -> Made:
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    boxes, each, given = rng.randint(3, 12), rng.randint(4, 15), rng.randint(1, 10)
    days, price = rng.randint(2, 9), rng.randint(2, 12)
    left = boxes * each - given
    kinds = [
        (
            f"{name} has {boxes} boxes with {each} {thing} in each, and gives {given} of them to {other}. "
            f"How many {thing} does {name} have left?",
            left,
        ),
        (
            f"{name} buys {each} {thing} a day for {days} days. One costs {price} coins. "
            f"How many coins does {name} spend altogether?",
            each * days * price,
        ),
        (
            f"{name} and {other} share {2 * each} {thing} equally. {name} then finds {given} more, and sells every "
            f"one of the {thing} for {price} coins. How many coins does {name} get?",
            (each + given) * price,
        ),
    ]
    question, answer = rng.choice(kinds)
    return question, str(answer)


def _algebra(rng: random.Random) -> Made:
    a, b, c, k = rng.randint(2, 9), rng.randint(1, 20), rng.randint(1, 9), rng.randint(2, 60)
    numerator, denominator = rng.randint(1, 30), rng.randint(2, 30)
    divisor = math.gcd(numerator, denominator)
    low, high = denominator // divisor, numerator // divisor
    fraction = str(high) if low == 1 else f"\\frac{{{high}}}{{{low}}}"
    kinds = [
        (f"Solve ${a}x + {b} = {a * c + b}$ for $x$.", str(c)),
        (f"What is the remainder when ${a}^{{{b}}}$ is divided by ${k}$?", str(pow(a, b, k))),
        (f"The roots of $x^2 - {a + b}x + {a * b}$ are $p$ and $q$. Find $p^2 + q^2$.", str(a * a + b * b)),
        (f"Write $\\frac{{{numerator}}}{{{denominator}}}$ in lowest terms.", fraction),
        (f"What is the greatest common divisor of ${a * k}$ and ${b * k}$?", str(math.gcd(a, b) * k)),
    ]
    return rng.choice(kinds)


def _contest(rng: random.Random) -> Made:
    """Problems whose answer is an integer from 0 to 999."""
    n, m, k = rng.randint(20, 400), rng.randint(2, 9), rng.randint(10, 11)
    p, q = rng.sample((2, 3, 5, 7, 11, 13), 2)
    kinds = [
        (
            f"How many positive integers at most ${n}$ are divisible by ${p}$ or by ${q}$?",
            n // p + n // q - n // (p * q),
        ),
        (
            f"Find the remainder when $1^{m} + 2^{m} + \\cdots + {n}^{m}$ is divided by $1000$.",
            sum(i**m for i in range(1, n + 1)) % 1000,
        ),
        (
            f"In how many ways can a committee of ${m // 2 + 1}$ be chosen from ${k}$ people?",
            math.comb(k, m // 2 + 1),
        ),
        (f"How many positive divisors does ${p}^{{{m}}} \\cdot {q}^{{{n % 20 + 1}}}$ have?", (m + 1) * (n % 20 + 2)),
    ]
    question, answer = rng.choice(kinds)
    return question, str(answer)


def _with_choices(rng: random.Random, num: int, is_book: bool = False) -> Made:
    question, right, others = rng.choice([_element_question, _unit_question, _number_question])(rng)
    wrong = rng.sample([other for other in others if other != right], num - 1)
    options = rng.sample([right, *wrong], num)
    answer = LETTERS[options.index(right)]
    if is_book:
        listed = "\n".join(f"{LETTERS[i]}. {text}" for i, text in enumerate(options))
        return f"Question: {question}\n\nChoices:\n{listed}", answer
    listed = "\n".join(f"{LETTERS[i]}: {text}" for i, text in enumerate(options))
    return f"Question: {question}\n\n{listed}", answer


def _element_question(rng: random.Random) -> tuple[str, str, list[str]]:
    number = rng.randint(1, len(ELEMENTS))
    return f"Which element has the atomic number {number}?", ELEMENTS[number - 1], ELEMENTS


def _unit_question(rng: random.Random) -> tuple[str, str, list[str]]:
    quantity, unit = rng.choice(UNITS)
    return f"In which SI unit is {quantity} measured?", unit, [name for _, name in UNITS]


def _number_question(rng: random.Random) -> tuple[str, str, list[str]]:
    mass, acceleration = rng.randint(2, 40), rng.randint(2, 15)
    force = mass * acceleration
    near = sorted({force + step for step in range(-12, 13)} | {mass + acceleration})
    question = f"What force, in newtons, accelerates a mass of {mass} kg at {acceleration} m/s^2?"
    return question, str(force), [str(value) for value in near if value > 0]


def _program(rng: random.Random) -> Made:
    a, b = rng.randint(2, 99), rng.randint(1, 99)
    kinds: list[tuple[str, Callable[[list[int]], int]]] = [
        (f"the sum of the numbers that are divisible by {a}", lambda v: sum(x for x in v if x % a == 0)),
        (f"how many of the numbers are greater than {b}", lambda v: sum(x > b for x in v)),
        (f"the largest number after {b} was subtracted from each", lambda v: max(v) - b),
        (f"the remainder of the sum of the numbers divided by {a}", lambda v: sum(v) % a),
    ]
    what, compute = rng.choice(kinds)
    cases = []
    for _ in range(5):
        values = [rng.randint(0, 100) for _ in range(rng.randint(1, 8))]
        text = f"{len(values)}\n{' '.join(map(str, values))}\n"
        cases.append({"type": "stdin_stdout", "input": text, "output": f"{compute(values)}\n"})
    question = (
        "Solve the following problem in Python. The first line of the input is a count n, the second line holds n "
        f"integers. Print {what}."
    )
    return question, json.dumps({"language": "python", "test_cases": cases})


_MAKERS: dict[str, Maker] = {
    **dict.fromkeys(("aime2024", "aime2025"), _contest),
    **dict.fromkeys(("amc2023", "math", "math500", "openrs", "openrs_easy", "openrs_hard"), _algebra),
    **dict.fromkeys(("gpqa_diamond", "gpqa_main", "mmlu"), lambda rng: _with_choices(rng, 4)),
    "mmlu_pro": lambda rng: _with_choices(rng, 10),
    "openbookqa": lambda rng: _with_choices(rng, 4, is_book=True),
    "gsm8k": _word_problem,
    "prime_code": _program,
}
