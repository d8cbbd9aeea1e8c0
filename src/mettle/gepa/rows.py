"""The rows that a prompt is learnt from, chosen by, and finally measured on; and putting a prompt into a row.

Parts: `RowSplit`, `split_rows`, `prompt_of_rows`, `with_prompt`; the names of a candidate's texts. Invariants: no task
stands on two sides (tasks are told apart by what they ask and expect, so copies count as one); the same seed splits the
same way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mettle.errors import UserError
from mettle.evals.output import task_key_of
from mettle.records.messages import messages_from

Row = dict[str, Any]

SYSTEM_PROMPT = "system_prompt"
TOOL_PREFIX = "tool:"


@dataclass(frozen=True, slots=True)
class RowSplit:
    """`train` feeds the reflection, `val` chooses among the candidates, `test` is seen by neither."""

    train: list[Row]
    val: list[Row]
    test: list[Row]


def split_rows(env: Any, num_train: int, num_val: int, num_test: int, seed: int) -> RowSplit:
    """Rows of `env`, each task once, in the order of `seed`; with too few rows, in proportion to what was asked.

    Training rows come from the training dataset, the others from the evaluation dataset, and from training rows to
    spare where that is too small; a dataset that is missing is replaced by the other. Raises: UserError when there are
    not enough rows to learn from some and choose by others.
    """
    train, held = getattr(env, "dataset", None), getattr(env, "eval_dataset", None)
    if train is None or held is None or len(train) == 0 or len(held) == 0:
        pool = _distinct(train if train is not None and len(train) else held, seed, set())
        sizes = _shares(len(pool), (num_train, num_val, num_test), "rows")
        return _cut(pool, sizes)
    chosen = _distinct(held, seed, set())
    learnt = _distinct(train, seed, {task_key_of(row) for row in chosen})
    sizes = (num_train, num_val, num_test)
    if len(chosen) < num_val + num_test:
        if len(chosen) + len(learnt) < sum(sizes):
            sizes = _shares(len(chosen) + len(learnt), sizes, "rows")
        spare = learnt[sizes[0] :]
        chosen += spare[: sizes[1] + sizes[2] - len(chosen)]
        sizes = (sizes[0], *_shares(len(chosen), sizes[1:], "evaluation rows"))
    if not learnt:
        raise UserError("every training row is an evaluation row as well; there is nothing else to learn from")
    return RowSplit(learnt[: sizes[0]], chosen[: sizes[1]], chosen[sizes[1] : sizes[1] + sizes[2]])


def prompt_of_rows(rows: Sequence[Row]) -> str:
    """The system prompt that all rows have; empty where none has one.

    Raises: UserError when rows differ in it, or when a prompt is bare text and has no place for one.
    """
    found = {_system_of(row) for row in rows}
    if len(found) > 1:
        raise UserError(
            f"the rows have {len(found)} different system prompts, and one prompt cannot replace them all; "
            "choose an environment (or arguments of it) with a single one"
        )
    return next(iter(found), "")


def with_prompt(row: Row, prompt: str) -> Row:
    """The row with `prompt` as its system message; without any where `prompt` is empty."""
    rest = row["prompt"][1:] if _has_system(row) else row["prompt"]
    head = messages_from([{"role": "system", "content": prompt}]) if prompt.strip() else []
    return {**row, "prompt": [*head, *rest]}


def _has_system(row: Row) -> bool:
    return bool(row["prompt"]) and row["prompt"][0]["role"] == "system"


def _system_of(row: Row) -> str:
    if isinstance(row["prompt"], str):
        raise UserError("this is a completion environment: its prompts are bare text, without a system prompt")
    if not _has_system(row):
        return ""
    content = row["prompt"][0].get("content")
    if not isinstance(content, str):
        raise UserError("the system prompt of the rows is not text alone; only text can be optimised")
    return content


def _distinct(rows: Any, seed: int, but: set[str]) -> list[Row]:
    seen = set(but)
    found = []
    for row in rows.to_list() if hasattr(rows, "to_list") else rows or []:
        key = task_key_of(row)
        if key not in seen:
            seen.add(key)
            found.append(row)
    random.Random(seed).shuffle(found)
    return found


def _shares(num_rows: int, wanted: Sequence[int], what: str) -> Any:
    """How many rows each side gets: what it asked for, or its part of what there is, but never nothing."""
    needed = sum(1 for num in wanted if num)
    if num_rows < needed:
        raise UserError(f"{num_rows} different {what} cannot be split into {needed} sides; there must be one for each")
    if num_rows >= sum(wanted):
        return tuple(wanted)
    sizes = [max(1, num * num_rows // sum(wanted)) if num else 0 for num in wanted]
    while sum(sizes) > num_rows:
        sizes[sizes.index(max(sizes))] -= 1
    return tuple(sizes)


def _cut(rows: Sequence[Row], sizes: Sequence[int]) -> RowSplit:
    num_train, num_val, num_test = sizes
    test, val = rows[:num_test], rows[num_test : num_test + num_val]
    return RowSplit(list(rows[num_test + num_val :][:num_train]), list(val), list(test))
