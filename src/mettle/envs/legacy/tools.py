"""The tools of `verifiers.utils.tools`: a calculator, and Python in a sandbox.

Parts: `calculator`, `python`. What asked web services (`ask`, `search`, `search_ddg`) is not offered. Invariants: no
text of a model is evaluated in this process; nothing survives from one call of `python` to the next.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import operator
import os
import textwrap
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from mettle.sandbox import JudgeResult, SandboxConfig, SandboxPool, StdioTest, Verdict

T = TypeVar("T")

__all__ = ["calculator", "python"]

MAX_OUTPUT: Final = 1000
TIMEOUT_S: Final = 10.0
MAX_DIGITS: Final = 4000
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
    (ran,) = _sandbox().judge(program).tests
    if ran.verdict is Verdict.TIMEOUT:
        return f"Error: Code execution timed out after {TIMEOUT_S:g} seconds"
    if ran.stderr.strip():
        return ran.stderr.strip()[-MAX_OUTPUT:]
    if ran.verdict in (Verdict.MEMORY, Verdict.OUTPUT_LIMIT, Verdict.KILLED):
        return f"Error: {ran.detail}"[:MAX_OUTPUT]
    return ran.stdout.strip()[:MAX_OUTPUT]


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


class _Sandbox:
    """A pool of this process, on a loop of its own, so that any thread can use it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="python tool", daemon=True).start()
        self._pool: SandboxPool = self._run(SandboxPool(SandboxConfig(timeout_s=TIMEOUT_S)).__aenter__())
        atexit.register(self._close)

    @property
    def is_usable(self) -> bool:
        """Whether this is the process that it was made in."""
        return self._pid == os.getpid()

    def judge(self, program: str) -> JudgeResult:
        """Run a program once. Raises: SandboxError when the sandbox itself failed."""
        return self._run(self._pool.judge(program, [StdioTest()]))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _close(self) -> None:
        if self.is_usable:
            self._run(self._pool.close())


_lock = threading.Lock()
_sandboxes: list[_Sandbox] = []


def _sandbox() -> _Sandbox:
    with _lock:
        if not _sandboxes or not _sandboxes[-1].is_usable:
            _sandboxes[:] = [_Sandbox()]
        return _sandboxes[-1]
