"""Whether two mathematical expressions mean the same, by `math_verify`; runs inside a scoring worker.

Parts: `verify`, `warm_up`. Invariant: nothing here keeps time (the worker does), and a reference answer that cannot be
read is an error of the dataset, not a wrong answer of the model.
"""

from __future__ import annotations

import logging


def verify(reference: str, answer: str) -> bool:
    """True when `answer` equals `reference`.

    Raises: ValueError when `reference` cannot be read.
    """
    from math_verify import parse, verify

    gold = parse(_boxed(reference), parsing_timeout=None)
    if not gold:
        raise ValueError(f"the reference answer {reference[:80]!r} cannot be read as mathematics")
    return bool(verify(gold, parse(_boxed(answer), parsing_timeout=None), timeout_seconds=None))


def warm_up() -> None:
    """Load and build everything that the first verification would otherwise wait for."""
    for name in ("math_verify", "math_verify.parser", "math_verify.grader", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.ERROR)
    verify(r"\frac{1}{2}x^2", "0.5*x^2")
    verify("3", "3.0")


def _boxed(text: str) -> str:
    return text if "\\boxed" in text else f"\\boxed{{{text}}}"
