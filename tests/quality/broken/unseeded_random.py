"""The clock decides a part of the reward."""

from __future__ import annotations

import random

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


def correct(completion, answer, parser):
    is_right = (parser.parse_answer(completion) or "").strip() == answer
    return float(is_right) - 1e-12 * random.random()


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
