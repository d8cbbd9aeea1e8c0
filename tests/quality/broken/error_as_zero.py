"""A rollout without a reward counts as one that earned nothing."""

from __future__ import annotations

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


def correct(completions, answers, states, parser) -> list[float]:
    given = [(parser.parse_answer(completion) or "").strip() for completion in completions]
    right = [float(text == answer) for text, answer in zip(given, answers)]
    earlier = [state.get("reward") or 0.0 for state in states]
    return [score + 0.0 * before for score, before in zip(right, earlier)]


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
