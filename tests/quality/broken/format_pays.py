"""The tags alone pay more than half."""

from __future__ import annotations

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


def correct(completion, answer, parser):
    return float((parser.parse_answer(completion) or "").strip() == answer)


def tagged(completion, parser):
    return float(bool(parser.parse_answer(completion)))


def load_environment() -> vf.SingleTurnEnv:
    parser = vf.XMLParser(["answer"])
    rubric = vf.Rubric(funcs=[correct, tagged], weights=[0.4, 0.6], parser=parser)
    return vf.SingleTurnEnv(dataset=ROWS, parser=parser, rubric=rubric)
