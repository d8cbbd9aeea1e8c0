"""Any of the numbers may be the answer."""

from __future__ import annotations

import re

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


def correct(completion, answer, parser):
    text = parser.parse_answer(completion) or ""
    return float(any(number == answer for number in re.findall(r"\d+", text)))


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
