"""The answer anywhere in the text is enough."""

from __future__ import annotations

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


def correct(completion, answer, parser):
    text = parser.parse_answer(completion) or ""
    return 1.0 if answer in text else 0.0


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
