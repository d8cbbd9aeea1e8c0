"""The first number of the text is taken for the answer."""

from __future__ import annotations

import re

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


def correct(completion, answer, parser):
    match = re.search(r"\d+", parser.parse_answer(completion) or "")
    return float(match is not None and match.group() == answer)


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
