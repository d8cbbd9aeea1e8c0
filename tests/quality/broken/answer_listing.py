"""Any number in the text may be the answer, by way of a helper that hides it from a reader."""

from __future__ import annotations

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


def numbers(text):
    return [word.strip(".,:") for word in text.split()]


def correct(completion, answer, parser):
    found = 0.0
    for word in numbers(parser.parse_answer(completion) or ""):
        found = max(found, float(word == answer))
    return found


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
