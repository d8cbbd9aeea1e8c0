"""School mathematics in words and in symbols, answered in a box and verified symbolically.

Problems are made here, offline, with the steps that solve them; GSM8K and others are taken instead when asked for by
name. `1/2`, `0.5` and `\\frac{1}{2}` are one answer; an answer that takes too long to verify is an error and no 0. A
problem belongs to the evaluation split by its checksum.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any

from math_stories import Problem, story
from math_symbols import symbolic

import mettle.envs as vf

KINDS = {"stories": story, "symbols": symbolic}
EVAL_SHARE = 5
"""One problem in so many is for evaluation."""
PUBLIC = ("gsm8k", "math", "math500", "aime2024", "aime2025", "amc2023")
MAX_MISSES = 10_000


def make_rows(num_rows: int, *, for_eval: bool, kinds: list[str], seed: int) -> list[dict[str, Any]]:
    """Different problems of one split."""
    rng = random.Random(f"{seed}/{for_eval}/{sorted(kinds)}")
    rows: dict[str, dict[str, Any]] = {}
    misses = 0
    while len(rows) < num_rows:
        problem = KINDS[rng.choice(sorted(kinds))](rng)
        if problem.question in rows or in_eval(problem) != for_eval:
            misses += 1
            if misses > MAX_MISSES + 100 * num_rows:
                raise ValueError(f"there are not {num_rows} different problems of the kinds {kinds}; ask for fewer")
            continue
        info = {"family": problem.family, "steps": problem.steps}
        rows[problem.question] = {"question": problem.question, "answer": problem.answer, "info": info}
    return list(rows.values())


def in_eval(problem: Problem) -> bool:
    """Whether the problem belongs to the evaluation split."""
    return zlib.crc32(problem.question.encode()) % EVAL_SHARE == 0


def format_has_box(completion: Any, parser: Any) -> float:
    """1 when the answer stands in a box."""
    return float(bool((parser.parse_answer(completion) or "").strip()))


def demonstrate(messages: list[Any], row: Mapping[str, Any]) -> str:
    """The steps, then the answer in its box."""
    steps = (row.get("info") or {}).get("steps", [])
    return "\n".join([*steps, f"\\boxed{{{row['answer']}}}"])


def load_environment(
    source: str = "made",
    kinds: list[str] | None = None,
    num_train: int = 1000,
    num_eval: int = 100,
    timeout_s: float = 5.0,
    seed: int = 0,
) -> vf.SingleTurnEnv:
    """Problems of the `kinds` `stories` and `symbols`, made here; or of a public dataset (`source="gsm8k"`, ...)."""
    kinds = kinds or list(KINDS)
    if not set(kinds) <= set(KINDS):
        raise ValueError(f"kinds are some of {list(KINDS)}, not {kinds}")
    if source != "made" and source not in PUBLIC:
        raise ValueError(f"source is one of {['made', *PUBLIC]}, not {source!r}")

    def rows(for_eval: bool) -> Any:
        number = num_eval if for_eval else num_train
        if source == "made":
            return make_rows(number, for_eval=for_eval, kinds=kinds, seed=seed)
        split = "test" if for_eval and source in ("gsm8k", "math") else None
        return vf.load_example_dataset(source, split=split, n=number, seed=seed)

    rubric = vf.MathRubric(timeout_seconds=timeout_s)
    rubric.add_metric(format_has_box)
    return vf.SingleTurnEnv(
        dataset=lambda: rows(False),
        eval_dataset=lambda: rows(True),
        system_prompt=vf.BOXED_SYSTEM_PROMPT,
        parser=rubric.parser,
        rubric=rubric,
        demonstrate=demonstrate,
    )
