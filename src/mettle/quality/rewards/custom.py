"""Tests of a reward that somebody wrote down, in a JSON file.

    [{"question": "What is 2 + 2?", "completion": "<answer>4</answer>", "expected": 1.0},
     {"example_id": 3, "completion": ["first turn", "second turn"], "min": 0.5, "name": "two turns"}]

Parts: `CustomTest`, `read_custom_tests`. A completion is text, an assistant message, or a list of the turns. Invariant:
a test that says nothing about the reward, or names no row, is refused when the file is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle.quality.checks import Check, check
from mettle.quality.rewards.cases import custom_case
from mettle.quality.rewards.layouts import user_text
from mettle.quality.rewards.trials import Trials

KEYS = frozenset({"example_id", "question", "completion", "min", "max", "expected", "tolerance", "name"})
BOUNDS = ("min", "max", "expected")


@dataclass(frozen=True, slots=True)
class CustomTest:
    """One test: a row of the environment, what is said to it, and bounds of the reward."""

    name: str
    row: Mapping[str, Any]
    completion: Any
    low: float
    high: float

    def run(self, trials: Trials) -> Check:
        """Score it."""
        outcome = trials.try_one(self.row, custom_case(self.name, 0, self.completion).policy)
        bounds = f"{self.low:g} to {self.high:g}" if self.low != self.high else f"{self.low:g}"
        if outcome.reward is None:
            return Check(f"custom: {self.name}", "fail", f"no reward: {outcome.error}", f"it is to be {bounds}")
        is_good = self.low <= outcome.reward <= self.high
        return check(f"custom: {self.name}", is_good, f"earned {outcome.reward:.4g}", f"it is to be {bounds}")


def read_custom_tests(path: Path, env: Any) -> list[CustomTest]:
    """The tests of a file.

    Raises: UserError for a file that cannot be read, or a test that cannot be run.
    """
    try:
        tests = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(tests, list) or not tests:
        raise UserError(f"{path} is to be a list of tests, each with `completion` and `question` or `example_id`")
    rows = [row for split in (env.eval_dataset, env.dataset) if split is not None for row in split]
    return [_test(f"{path}: test {number}", raw, rows, number) for number, raw in enumerate(tests)]


def _test(where: str, raw: Any, rows: list[dict[str, Any]], number: int) -> CustomTest:
    if not isinstance(raw, Mapping):
        raise UserError(f"{where} is no object")
    unknown = sorted(set(raw) - KEYS)
    if unknown:
        raise UserError(f"{where} has the unknown key {unknown[0]!r}; keys are {', '.join(sorted(KEYS))}")
    completion = raw.get("completion")
    if not isinstance(completion, str | Mapping | list):
        raise UserError(f"{where} has no `completion`: a text, an assistant message, or a list of turns")
    if not any(isinstance(raw.get(key), int | float) for key in BOUNDS):
        raise UserError(f"{where} says nothing about the reward; give `expected`, `min` or `max`")
    tolerance = float(raw.get("tolerance", 1e-6))
    low, high = float(raw.get("min", "-inf")), float(raw.get("max", "inf"))
    if "expected" in raw:
        low, high = float(raw["expected"]) - tolerance, float(raw["expected"]) + tolerance
    return CustomTest(str(raw.get("name", number)), _row(where, raw, rows), completion, low, high)


def _row(where: str, raw: Mapping[str, Any], rows: list[dict[str, Any]]) -> Mapping[str, Any]:
    if "example_id" in raw:
        found = [row for row in rows if raw["example_id"] in (row.get("example_id"), row.get("src_id"))]
        named = f"example_id {raw['example_id']!r}"
    else:
        question = str(raw.get("question", "")).strip()
        found = [row for row in rows if question and user_text(row).strip() == question]
        named = f"question {question[:60]!r}"
    if not found:
        raise UserError(f"{where} names {named}, which no row of the environment has")
    return found[0]
