"""Sums, differences and products of whole numbers, answered with one number.

A question belongs to the evaluation split by its checksum, so the splits never overlap.
"""

from __future__ import annotations

import operator
import random
import re
import zlib
from typing import Any

import mettle.envs as vf

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUMBER = re.compile(r"[+-]?\d{1,100}")
"""A number with more digits is no answer, and Python refuses to read one of thousands."""
XML_PROMPT = "Think inside <think> tags, then give the number alone inside <answer> tags."
EVAL_SHARE = 8
"""One question in so many is for evaluation."""


def make_rows(num_rows: int, *, seed: int, for_eval: bool, operations: str, max_value: int) -> list[dict[str, Any]]:
    """Different questions of one split."""
    rng = random.Random(f"{seed}/{for_eval}/{operations}/{max_value}")
    rows: dict[str, dict[str, Any]] = {}
    misses = 0
    while len(rows) < num_rows:
        a, b, sign = rng.randint(0, max_value), rng.randint(0, max_value), rng.choice(operations)
        question = f"{a} {sign} {b}"
        if question in rows or (zlib.crc32(question.encode()) % EVAL_SHARE == 0) != for_eval:
            misses += 1
            if misses > 10_000:
                raise ValueError(f"there are not {num_rows} different questions up to {max_value}; raise max_value")
            continue
        misses = 0
        rows[question] = {"question": question, "answer": str(OPERATIONS[sign](a, b))}
    return list(rows.values())


def correct(completion: Any, answer: str, parser: Any) -> float:
    """1 when the number given is the answer."""
    given = (parser.parse_answer(completion) or "").strip()
    return float(NUMBER.fullmatch(given) is not None and int(given) == int(answer))


def is_number(completion: Any, parser: Any) -> float:
    """1 when a number, and nothing but a number, was given."""
    return float(NUMBER.fullmatch((parser.parse_answer(completion) or "").strip()) is not None)


def load_environment(
    operations: str = "+-*",
    max_value: int = 99,
    answer_format: str = "plain",
    num_train: int = 2000,
    num_eval: int = 200,
    seed: int = 0,
) -> vf.SingleTurnEnv:
    """Questions like `12 + 7`; the answer is a plain number, or inside `<answer>` with `answer_format="xml"`."""
    unknown = sorted(set(operations) - set(OPERATIONS))
    if unknown or not operations:
        raise ValueError(f"operations are some of {''.join(OPERATIONS)}, not {operations!r}")
    if answer_format not in ("plain", "xml"):
        raise ValueError(f"answer_format is 'plain' or 'xml', not {answer_format!r}")
    parser = vf.XMLParser(["answer"]) if answer_format == "xml" else vf.Parser()
    split = {"seed": seed, "operations": operations, "max_value": max_value}
    return vf.SingleTurnEnv(
        dataset=lambda: make_rows(num_train, for_eval=False, **split),
        eval_dataset=lambda: make_rows(num_eval, for_eval=True, **split),
        system_prompt=XML_PROMPT if answer_format == "xml" else None,
        parser=parser,
        rubric=vf.Rubric(funcs=[correct, is_number], weights=[1.0, 0.0], parser=parser),
    )
