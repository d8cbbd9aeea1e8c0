"""The question states its answer."""

from __future__ import annotations

import mettle.envs as vf

ROWS = [{"question": f"What is {n} plus 1? (solution: {n + 1})", "answer": str(n + 1)} for n in range(10, 40)]


def correct(completion, answer, parser):
    return float((parser.parse_answer(completion) or "").strip() == answer)


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
