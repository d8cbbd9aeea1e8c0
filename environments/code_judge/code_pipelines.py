"""Small functions over lists of numbers and of words, composed of a choice, a change and a summary.

Parts: `pipeline_problems`. Each problem is a statement, a solution in Python and a maker of arguments; thousands of
different ones come from a few dozen parts. A problem's own solution says what is expected, so statement and tests
cannot disagree in more than words; the words of each part stand beside its code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from code_problem import Problem

NUMBER_CHOICES = [
    ("", "True"),
    ("that are even", "x % 2 == 0"),
    ("that are odd", "x % 2 == 1"),
    ("that are negative", "x < 0"),
    ("that are greater than {k}", "x > {k}"),
    ("that are less than {k}", "x < {k}"),
    ("that are divisible by {k}", "x % {k} == 0"),
    ("at even positions (the first is at position 0)", "i % 2 == 0"),
    ("that are greater than the number before them (the first one never is)", "i > 0 and x > numbers[i - 1]"),
]
NUMBER_CHANGES = [
    ("", "x"),
    (", squared", "x * x"),
    (", each increased by {c}", "x + {c}"),
    (", each multiplied by {c}", "x * {c}"),
    (", each without its sign", "abs(x)"),
    (", each replaced by its remainder when divided by {c} (from 0 to {c} - 1)", "x % {c}"),
    (", each replaced by the sum of the digits of its absolute value", "sum(map(int, str(abs(x))))"),
]
NUMBER_SUMMARIES = [
    ("their sum", "sum(found)"),
    ("how many there are", "len(found)"),
    ("the largest of them, or 0 when there are none", "max(found, default=0)"),
    ("the smallest of them, or 0 when there are none", "min(found, default=0)"),
    ("them sorted from the smallest to the largest, as a list", "sorted(found)"),
    ("them in reverse order, as a list", "found[::-1]"),
    ("how many different values there are", "len(set(found))"),
    ("the different values sorted from the largest to the smallest, as a list", "sorted(set(found), reverse=True)"),
    ("the largest minus the smallest, or 0 when there are none", "max(found, default=0) - min(found, default=0)"),
    ("their running sums, as a list", "[sum(found[: i + 1]) for i in range(len(found))]"),
    ("the value that occurs most often, the smallest such value on a tie, or 0 when there are none",
     "min(found, key=lambda v: (-found.count(v), v), default=0)"),
]  # fmt: skip
WORD_CHOICES = [
    ("", "True"),
    ("longer than {c} letters", "len(x) > {c}"),
    ("that start with a vowel", "x[0] in 'aeiou'"),
    ("that end with a consonant", "x[-1] not in 'aeiou'"),
    ("that contain the letter {l}", "'{l}' in x"),
    ("that read the same backwards", "x == x[::-1]"),
]
WORD_CHANGES = [
    ("", "x"),
    (", each in capital letters", "x.upper()"),
    (", each written backwards", "x[::-1]"),
    (", each with its letters in alphabetical order", "''.join(sorted(x))"),
    (", each without its vowels", "''.join(c for c in x if c not in 'aeiou')"),
    (", each cut after {c} letters", "x[:{c}]"),
]
WORD_SUMMARIES = [
    ("how many there are", "len(found)"),
    ("them joined by a hyphen, as a string", "'-'.join(found)"),
    ("them sorted alphabetically, as a list", "sorted(found)"),
    ("the longest of them, the first one on a tie, or an empty string when there are none",
     "max(found, key=len, default='')"),
    ("the total number of their letters", "sum(map(len, found))"),
    ("a dictionary from each to how often it occurs", "{{v: found.count(v) for v in found}}"),
]  # fmt: skip
SYLLABLES = ["ba", "el", "ko", "ni", "ra", "us", "ti", "oo", "man", "pet", "i", "ul", "sos", "dad"]


def pipeline_problems(rng: random.Random) -> Iterator[Problem]:
    """Problems without end; the same one may come again."""
    while True:
        yield _numbers(rng) if rng.random() < 0.6 else _words(rng)


def _numbers(rng: random.Random) -> Problem:
    parts = rng.choice(NUMBER_CHOICES), rng.choice(NUMBER_CHANGES), rng.choice(NUMBER_SUMMARIES)
    return _compose(rng, "numbers", "a list of whole numbers", parts, number_arguments)


def _words(rng: random.Random) -> Problem:
    parts = rng.choice(WORD_CHOICES), rng.choice(WORD_CHANGES), rng.choice(WORD_SUMMARIES)
    return _compose(rng, "words", "a list of words in small letters", parts, word_arguments)


def _compose(rng: random.Random, name: str, what: str, parts: tuple[tuple[str, str], ...], arguments: Any) -> Problem:
    values = {"k": rng.randint(2, 12), "c": rng.randint(2, 5), "l": rng.choice("aeiklnoprstu")}
    (chosen, test), (changed, change), (asked, summary) = (
        (words.format(**values), code.format(**values)) for words, code in parts
    )
    statement = (
        f"Write a function `solve({name})`, where `{name}` is {what}. Take the {name}{' ' if chosen else ''}{chosen}"
        f"{changed}, in the order in which they come. Return {asked}."
    )
    solution = (
        f"def solve({name}):\n    found = [{change} for i, x in enumerate({name}) if {test}]\n    return {summary}\n"
    )
    return Problem(f"pipeline over {name}", statement, solution, arguments, function="solve")


def number_arguments(rng: random.Random, size: int) -> list[list[int]]:
    """One list of about `size` numbers."""
    return [[rng.randint(-20, 40) for _ in range(size)]]


def word_arguments(rng: random.Random, size: int) -> list[list[str]]:
    """One list of about `size` words."""
    return [["".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 4))) for _ in range(size)]]
