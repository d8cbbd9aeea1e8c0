"""The tools of `verifiers.utils.tools`: a calculator, and Python in a sandbox.

Parts: `calculator`, `python`. What asked web services (`ask`, `search`, `search_ddg`) is not offered. Invariants: no
text of a model is evaluated in this process; nothing survives from one call of `python` to the next.
"""

from __future__ import annotations

import ast
import operator
import textwrap
from collections.abc import Callable
from typing import Any, Final

from mettle.envs.sandboxes.shared import shared_machines
from mettle.sandbox import ExecResult, MachineConfig

__all__ = ["calculator", "python"]

MAX_OUTPUT: Final = 1000
TIMEOUT_S: Final = 10.0
MAX_DIGITS: Final = 4000
PACKAGES: Final = ("numpy", "scipy", "sympy")
"""What code may import besides the standard library, where it is installed beside this library."""

_OPERATORS: Final[dict[type[ast.AST], Callable[..., Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Evaluates a single line of Python math expression. No imports or variables allowed.

    Args:
        expression (str): A mathematical expression using only numbers and basic operators (+,-,*,/,**,())

    Returns:
        The result of the calculation or an error message

    Examples:
        "2 + 2" -> "4"
        "3 * (17 + 4)" -> "63"
        "100 / 5" -> "20.0"
    """
    if not set(expression) <= set("0123456789+-*/.() "):
        return "Error: Invalid characters in expression"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except Exception as error:  # what the model wrote is answered, whatever is wrong with it
        return f"Error: {error}"


def python(code: str) -> str:
    """Evaluates Python code like a Jupyter notebook cell, returning output and/or the last expression value.

    Args:
        code (str): A block of Python code

    Returns:
        The output (stdout + last expression if not None) or error message

    Examples:
        {"code": "import numpy as np\\nnp.array([1, 2, 3]) + np.array([4, 5, 6])"} -> "[5 7 9]"
        {"code": "x = 5\\ny = 10\\nx + y"} -> "15"
        {"code": "a, b = 3, 4\\na, b"} -> "(3, 4)"
    """
    try:
        program = _with_last_value_printed(code)
    except (SyntaxError, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:MAX_OUTPUT]
    ran = shared_machines().submit(_in_a_machine(program)).result()
    if ran.is_timed_out:
        return f"Error: Code execution timed out after {TIMEOUT_S:g} seconds"
    if ran.is_out_of_memory:
        return "Error: Code execution ran out of memory"
    return (ran.stderr.strip() or ran.stdout.strip())[:MAX_OUTPUT]


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("only numbers and the operators + - * / // ** are understood")


def _power(base: Any, exponent: Any) -> Any:
    """A power that a process can afford: 9**9**9 would run for hours."""
    if isinstance(base, int) and isinstance(exponent, int) and len(str(abs(base))) * abs(exponent) > MAX_DIGITS:
        raise ValueError("the result is too large")
    return base**exponent


def _with_last_value_printed(code: str) -> str:
    """The code, with the value of an expression at its end printed unless it is None."""
    tree = ast.parse(textwrap.dedent(code))
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return textwrap.dedent(code)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    return f"{ast.unparse(tree)}\n_ = {ast.unparse(last.value)}\nif _ is not None: print(_)"


async def _in_a_machine(program: str) -> ExecResult:
    machine = await shared_machines().create(MachineConfig(), PACKAGES)
    try:
        return await machine.exec(["python3", "-c", program], timeout_s=TIMEOUT_S)
    finally:
        await machine.delete()
