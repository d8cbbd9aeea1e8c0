"""Which rollouts become training data, and what became of the others.

Parts: `KeptRollouts`, `select`. Order: failures and cut-off rollouts go first, then those below the threshold,
then all but the best of each task, then copies. Invariants: each rollout is counted once, under the first reason that
applies; a task is whole on one side of the split, and stays there however much is generated later.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mettle.evals.facts import facts_of_row
from mettle.evals.output import task_key_of
from mettle.evals.passing import PassRule
from mettle.synthesis.chats import Chat, Unusable, chats_of, text_of
from mettle.synthesis.config import Rules
from mettle.synthesis.duplicates import Seen


@dataclass(frozen=True, slots=True)
class Kept:
    """A rollout that was kept: its chats, and its row of the results."""

    task: str
    row: Mapping[str, Any]
    chats: list[Chat]
    index: int


@dataclass(slots=True)
class KeptRollouts:
    """Kept rollouts by side, counts by reason for the others, and the tasks that were seen."""

    train: list[Kept] = field(default_factory=list)
    held_out: list[Kept] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    num_rollouts: int = 0
    tasks: set[str] = field(default_factory=set)


def select(rows: Iterable[Mapping[str, Any]], rules: Rules, passing: PassRule | None = None) -> KeptRollouts:
    """Sort the rows of an evaluation into what trains, what is held out, and what is left out.

    `passing` says what is good enough; without it, the reward has to reach `min_reward`.
    """
    passing = passing or PassRule(float("-inf") if rules.min_reward is None else rules.min_reward)
    selection = KeptRollouts()
    by_task: dict[str, list[Kept]] = defaultdict(list)
    for index, row in enumerate(rows):
        selection.num_rollouts += 1
        task = str(row.get("task_key") or task_key_of(row))
        selection.tasks.add(task)
        kept = _candidate(row, rules, passing, task, index, selection.left_out)
        if kept is not None:
            by_task[task].append(kept)
    seen = Seen(rules.near)
    for task, candidates in by_task.items():
        # The file has rollouts in the order in which they ended, which differs from run to run; this order does not.
        candidates.sort(key=lambda kept: (-float(kept.row["reward"]), _length(kept), text_of(kept.chats[-1].messages)))
        side = selection.held_out if _is_held_out(task, rules) else selection.train
        side += _best(candidates, rules.best, seen, selection.left_out)
    return selection


def _candidate(
    row: Mapping[str, Any], rules: Rules, passing: PassRule, task: str, index: int, left_out: Counter[str]
) -> Kept | None:
    facts = facts_of_row(row)
    if facts.reward is None:
        left_out["failed"] += 1
    elif facts.is_truncated and not rules.keep_truncated:
        left_out["cut off"] += 1
    elif not passing.holds(facts):
        left_out["reward below the threshold"] += 1
    else:
        try:
            return Kept(task, row, chats_of(row, rules.reasoning), index)
        except Unusable as reason:
            left_out[str(reason)] += 1
    return None


def _best(candidates: list[Kept], num: int, seen: Seen, left_out: Counter[str]) -> list[Kept]:
    """The first `num` candidates that are no copies; the others are counted."""
    best: list[Kept] = []
    for kept in candidates:
        if len(best) == num:
            left_out["not among the best of its task"] += 1
            continue
        start = len(kept.row["prompt"])
        messages = kept.chats[-1].messages
        verdict = seen.verdict(text_of(messages[:start]), text_of(messages[start:]))
        if verdict is None:
            best.append(kept)
        else:
            left_out[verdict] += 1
    return best


def _length(kept: Kept) -> int:
    return len(text_of(kept.chats[-1].messages))


def _is_held_out(task: str, rules: Rules) -> bool:
    name = hashlib.blake2b(f"{rules.seed}/{task}".encode(), digest_size=8).digest()
    return int.from_bytes(name, "big") < rules.held_out * 2**64
