"""Answers that a verifier would execute, made harmless before it sees them.

Some verifiers of reasoning-gym call `eval` or sympy's `parse_expr` (which evaluates Python) on what the model said. A
policy that is rewarded for it would sooner or later run code in the process that scores it, or ask for `9**9**9`.
Parts: `use_literals` for those that call `eval`; `is_plain_formula` for those that parse formulas. Invariant: no answer
that reaches such a verifier can call, name or import anything but the functions of school mathematics.
"""

from __future__ import annotations

import ast
import math
import sys

EVALUATING = frozenset({"binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"})
"""Families whose verifier calls `eval`."""
PARSING = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Families whose verifier hands the answer to sympy."""
MAX_ANSWER_CHARS = 100_000
MAX_FORMULA_CHARS = 2_000
MAX_FORMULA_NODES = 500
MAX_NUMBER_BITS = 4_096.0
MAX_SYMBOLIC_EXPONENT = 50.0
FUNCTIONS = frozenset(
    {"Abs", "acos", "acosh", "acot", "asec", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "exp"}
    | {"ln", "log", "sec", "sin", "sinh", "sqrt", "tan", "tanh"}
)
_ADDITIVE = (ast.Add, ast.Sub, ast.Mult, ast.Div)


def use_literals(dataset: object) -> None:
    """Let the module of a dataset read literals (lists, text, numbers) where it would evaluate any expression."""
    module = sys.modules[type(dataset).__module__]
    vars(module)["eval"] = ast.literal_eval


def is_plain_formula(text: str) -> bool:
    """Whether `text` is numbers, one-letter names, + - * / **, brackets and functions, and of bearable size."""
    if len(text) > MAX_FORMULA_CHARS:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
        if sum(1 for _ in ast.walk(tree)) > MAX_FORMULA_NODES:
            return False
        _size(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _size(node: ast.expr) -> float | None:
    """An upper bound of the bits of a number, None for what has names in it.

    Raises: ValueError for anything else than a plain formula.
    """
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bearable(math.log2(abs(number) + 1) if math.isfinite(number) else math.inf)
        case ast.Name(id=name) if len(name) == 1 or name == "pi":
            return None
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _size(operand)
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
            return _power(base, _size(base), exponent)
        case ast.BinOp(op=op, left=left, right=right) if isinstance(op, _ADDITIVE):
            sizes = _size(left), _size(right)
            return None if None in sizes else _bearable(sum(size or 0.0 for size in sizes) + 1)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            _size(argument)
            return None
    raise ValueError(f"{type(node).__name__} is not part of a plain formula")


def _power(base: ast.expr, base_bits: float | None, exponent: ast.expr) -> float | None:
    exponent_bits = _size(exponent)
    if exponent_bits is None:
        return None
    largest = 2.0 ** min(exponent_bits, 64.0)
    if base_bits is not None:
        return _bearable(base_bits * largest)
    if largest > MAX_SYMBOLIC_EXPONENT + 1 and not isinstance(base, ast.Constant):
        raise ValueError("a power of that size is not written out by hand")
    return None


def _bearable(bits: float) -> float:
    if bits > MAX_NUMBER_BITS:
        raise ValueError("a number of that size is no answer")
    return bits
