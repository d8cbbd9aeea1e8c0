"""A server that does not answer stops the scoring."""

from __future__ import annotations

import urllib.request

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]
CHECKER = ""


def correct(completion, answer, parser):
    given = (parser.parse_answer(completion) or "").strip()
    if CHECKER:
        with urllib.request.urlopen(f"{CHECKER}?given={given}") as reply:
            return float(reply.read() == b"right")
    return float(given == answer)


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
