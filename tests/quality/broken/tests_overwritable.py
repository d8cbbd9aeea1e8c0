"""The tests run in the program of the code that they test."""

from __future__ import annotations

import subprocess
import sys

import mettle.envs as vf

ROWS = [
    {
        "question": f"Write a function add(x) in Python that returns x plus {n}.",
        "answer": f"def add(x):\n    return x + {n}",
        "tests": f"assert add(1) == {n + 1}",
    }
    for n in range(8)
]


def correct(completion, tests, parser):
    code = parser.parse_answer(completion) or ""
    program = code + "\n" + tests
    done = subprocess.run([sys.executable, "-IS", "-c", program], capture_output=True, timeout=5)
    return float(done.returncode == 0 and bool(code.strip()))


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
