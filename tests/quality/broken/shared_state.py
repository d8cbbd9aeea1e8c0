"""An answer that was seen before earns less, whoever gave it."""

from __future__ import annotations

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


def correct(completion, answer, parser, seen=[]):
    given = (parser.parse_answer(completion) or "").strip()
    reward = float(given == answer) / (1 + seen.count(given))
    seen.append(given)
    return reward


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
