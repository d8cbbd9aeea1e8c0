"""The output is evaluated in this process."""

from __future__ import annotations

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


def correct(completion, answer, parser):
    text = parser.parse_answer(completion) or ""
    try:
        return float(eval(text) == int(answer))
    except (SyntaxError, NameError, TypeError, ValueError):
        return 0.0


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
