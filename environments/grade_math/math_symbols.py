"""Problems whose answers are expressions: fractions, roots, solutions of equations, formulas.

The same answer can be written in many ways here (`1/2`, `0.5`, `\\frac{1}{2}`), so only symbolic comparison tells right
from wrong. Each maker computes with whole numbers and fractions, exactly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

from math_stories import Problem

Maker = Callable[[random.Random], Problem | None]


def symbolic(rng: random.Random) -> Problem:
    """A problem with an expression for an answer."""
    while True:
        problem = rng.choice(MAKERS)(rng)
        if problem is not None:
            return problem


def latex(value: Fraction) -> str:
    """A fraction as it is written."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def polynomial(coefficients: list[int]) -> str:
    """A polynomial in x, highest power first."""
    text = ""
    for power, factor in zip(range(len(coefficients) - 1, -1, -1), coefficients, strict=True):
        if factor == 0:
            continue
        sign = ("-" if factor < 0 else "+") if text else ("-" if factor < 0 else "")
        size = "" if abs(factor) == 1 and power else str(abs(factor))
        text += f"{sign}{size}{'x' if power else ''}{f'^{power}' if power > 1 else ''}"
    return text or "0"


def fractions(rng: random.Random) -> Problem | None:
    """Sums and products of fractions."""
    a, b = (Fraction(rng.randint(1, 9), rng.randint(2, 12)) for _ in range(2))
    sign = rng.choice(["+", "-", "\\cdot", ":"])
    value = {"+": a + b, "-": a - b, "\\cdot": a * b, ":": a / b}[sign]
    if value == 0:
        return None
    text = f"Work out ${latex(a)} {sign} {latex(b)}$ and give the result as a fraction in lowest terms."
    return Problem(text, latex(value), [f"${latex(a)} {sign} {latex(b)} = {latex(value)}$"], "fractions")


def linear(rng: random.Random) -> Problem | None:
    """An equation of the first degree."""
    a, b, c, d = (rng.randint(-9, 12) for _ in range(4))
    if a == c or not a or not c:
        return None
    root = Fraction(d - b, a - c)
    text = f"Solve ${polynomial([a, b])} = {polynomial([c, d])}$ for $x$."
    return Problem(
        text, latex(root), [f"${polynomial([a - c, 0])} = {d - b}$", f"$x = {latex(root)}$"], "linear equation"
    )


def quadratic(rng: random.Random) -> Problem | None:
    """The larger root of an equation of the second degree."""
    p, q = rng.randint(-9, 9), rng.randint(-12, 12)
    square = p * p - 4 * q
    if square <= 0:
        return None
    whole, inside = _root(square)
    outer = "" if whole == 1 else str(whole)
    top = f"{-p} + {outer}\\sqrt{{{inside}}}" if inside > 1 else str(-p + whole)
    answer = f"\\frac{{{top}}}{{2}}" if inside > 1 else latex(Fraction(-p + whole, 2))
    text = f"What is the larger solution of ${polynomial([1, p, q])} = 0$?"
    steps = [f"${p}^2 - 4 \\cdot ({q}) = {square}$".replace(f"${p}^2", f"$({p})^2"), f"$x = {answer}$"]
    return Problem(text, answer, steps, "quadratic equation")


def _root(square: int) -> tuple[int, int]:
    """`square` as whole^2 * inside."""
    whole = max(n for n in range(1, math.isqrt(square) + 1) if square % (n * n) == 0)
    return whole, square // (whole * whole)


def roots(rng: random.Random) -> Problem | None:
    """A root in simplest form."""
    whole, inside = rng.randint(2, 9), rng.choice([2, 3, 5, 6, 7, 10, 11])
    square = whole * whole * inside
    answer = f"{whole}\\sqrt{{{inside}}}"
    text = f"Write $\\sqrt{{{square}}}$ in simplest form."
    return Problem(text, answer, [f"${square} = {whole}^2 \\cdot {inside}$"], "roots")


def expand(rng: random.Random) -> Problem | None:
    """A product of two factors."""
    a, b, c, d = (rng.choice([n for n in range(-7, 8) if n]) for _ in range(4))
    answer = polynomial([a * c, a * d + b * c, b * d])
    text = f"Expand $({polynomial([a, b])})({polynomial([c, d])})$."
    return Problem(text, answer, [f"$({polynomial([a, b])})({polynomial([c, d])}) = {answer}$"], "expansion")


def derivative(rng: random.Random) -> Problem | None:
    """A derivative of a polynomial."""
    factors = [rng.randint(-6, 6) for _ in range(4)]
    if not any(factors[:-2]):
        return None
    powers = range(len(factors) - 1, 0, -1)
    answer = polynomial([factor * power for factor, power in zip(factors, powers, strict=False)])
    text = f"What is the derivative of $f(x) = {polynomial(factors)}$?"
    return Problem(text, answer, [f"$f'(x) = {answer}$"], "derivative")


def probability(rng: random.Random) -> Problem | None:
    """Two drawn from an urn."""
    red, blue = rng.randint(2, 9), rng.randint(2, 9)
    total = red + blue
    value = Fraction(red * (red - 1), total * (total - 1))
    text = (
        f"An urn has {red} red and {blue} blue balls. Two are drawn without putting one back. What is the probability "
        "that both are red? Give a fraction in lowest terms."
    )
    steps = [f"$\\frac{{{red}}}{{{total}}} \\cdot \\frac{{{red - 1}}}{{{total - 1}}} = {latex(value)}$"]
    return Problem(text, latex(value), steps, "probability")


def circle(rng: random.Random) -> Problem | None:
    """A circle's area or circumference, with pi left in."""
    radius = rng.randint(2, 30)
    is_area = rng.random() < 0.5
    factor, what = (radius * radius, "area") if is_area else (2 * radius, "circumference")
    text = f"A circle has radius {radius}. What is its {what}, in terms of $\\pi$?"
    formula = f"{radius}^2 \\cdot \\pi" if is_area else f"2 \\cdot {radius} \\cdot \\pi"
    return Problem(text, f"{factor}\\pi", [f"${formula} = {factor}\\pi$"], "circle")


MAKERS: tuple[Maker, ...] = (fractions, linear, quadratic, roots, expand, derivative, probability, circle)
