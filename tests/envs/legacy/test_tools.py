"""The tools of `verifiers.utils.tools`."""

from __future__ import annotations

import pytest

from mettle.envs.legacy.tools import calculator, python
from mettle.sandbox import SandboxConfig, probe


@pytest.fixture
def isolated():
    if not probe(SandboxConfig()).is_at_least("ns"):
        pytest.skip("this host cannot isolate code")


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("2 + 2", "4"),
        ("3 * (17 + 4)", "63"),
        ("100 / 5", "20.0"),
        ("2**-1", "0.5"),
        ("-(7//2)", "-3"),
        ("1/0", "Error: division by zero"),
        ("9**9**9", "Error: the result is too large"),
        ("__import__('os')", "Error: Invalid characters in expression"),
        ("", "Error: invalid syntax"),
    ],
)
def test_a_line_of_arithmetic_is_evaluated(expression, answer):
    assert calculator(expression).startswith(answer)


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("x = 5\ny = 10\nx + y", "15"),
        ("a, b = 3, 4\na, b", "(3, 4)"),
        ("  print('a')\n  print('b')", "a\nb"),
        ("x = 5", ""),
        ("import numpy as np\nnp.array([1, 2, 3]) + 1", "[2 3 4]"),
        ("1 / 0", "Traceback"),
        ("def", "SyntaxError: invalid syntax"),
    ],
)
def test_code_is_run_like_a_notebook_cell(code, answer):
    assert python(code).startswith(answer)


@pytest.mark.usefixtures("isolated")
def test_code_is_run_away_from_the_host(tmp_path):
    (tmp_path / "secret").write_text("here")
    assert "FileNotFoundError" in python(f"open({str(tmp_path / 'secret')!r}).read()")
    assert python("x = 1") == ""
    assert "NameError" in python("x")
    assert python("print('a' * 5000)") == "a" * 1000
