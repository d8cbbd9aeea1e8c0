"""Rows that the search never saw, before and after: what the new prompt is worth.

Parts: `measure`, `HeldOutComparison`, `compare`. The validation score of the best of many candidates is too good by
selection; these rows chose nothing, so their difference is an estimate of what a user gets. Invariant: a row counts
when it has a reward under both prompts; the difference is taken row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mettle.evals.estimator import Difference, Estimate, mean_of, mean_over_tasks, paired_difference
from mettle.gepa.journal import PromptAttempt
from mettle.gepa.rollouts import Rollouts
from mettle.gepa.rows import Row


@dataclass(frozen=True, slots=True)
class HeldOutComparison:
    """Mean reward before and after over the same rows, and the paired difference; failed rollouts count neither way."""

    num_rows: int
    before: Estimate | None
    after: Estimate | None
    difference: Difference | None
    num_failed: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


async def measure(
    rollouts: Rollouts, rows: Sequence[Row], candidate: Mapping[str, str], num_rollouts: int
) -> dict[int, list[PromptAttempt]]:
    """`num_rollouts` attempts on each row."""
    named = [(f"test:{index}:{turn}", row) for index, row in enumerate(rows) for turn in range(num_rollouts)]
    attempts = await rollouts.run(named, candidate)
    found: dict[int, list[PromptAttempt]] = {}
    for attempt in attempts:
        found.setdefault(int(attempt.row.split(":")[1]), []).append(attempt)
    return found


def compare(
    before: Mapping[int, Sequence[PromptAttempt]], after: Mapping[int, Sequence[PromptAttempt]]
) -> HeldOutComparison:
    """What changed from one prompt to the other."""
    old, new = _rewards(before), _rewards(after)
    both = [index for index in old if index in new]
    means = [(mean_of(old[index]), mean_of(new[index])) for index in both]
    attempts = [attempt for side in (before, after) for found in side.values() for attempt in found]
    return HeldOutComparison(
        len(both),
        mean_over_tasks([old[index] for index in both]),
        mean_over_tasks([new[index] for index in both]),
        paired_difference([a for a, _ in means], [b for _, b in means]),
        sum(attempt.reward is None for attempt in attempts),
    )


def _rewards(side: Mapping[int, Sequence[PromptAttempt]]) -> dict[int, list[float]]:
    found = {index: [a.reward for a in attempts if a.reward is not None] for index, attempts in side.items()}
    return {index: rewards for index, rewards in found.items() if rewards}
