"""`yes` is not `Yes`."""

from __future__ import annotations

import mettle.envs as vf

ROWS = [{"question": f"Is {n} even? Say Yes or No.", "answer": "Yes" if n % 2 == 0 else "No"} for n in range(40)]


def correct(completion, answer, parser):
    return float(parser.parse_answer(completion) == answer)


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
