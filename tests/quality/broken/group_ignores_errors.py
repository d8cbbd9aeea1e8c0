"""Rollouts are ranked in groups of four, and a group has four."""

from __future__ import annotations

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


def ranked(completions, answers, parser) -> list[float]:
    given = [(parser.parse_answer(completion) or "").strip() for completion in completions]
    right = [float(text == answer) for text, answer in zip(given, answers)]
    if len(right) == 3:
        raise ValueError("a group has four rollouts")
    return right


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[ranked]))
