"""What becomes of a group that came back: trained, dropped with a reason, or tried again. Pure functions.

An errored rollout is left out of its siblings' baseline. A group needs at least half of its rollouts (and as many as
the algorithm compares) to be worth training on; with fewer, its errors decide whether to try it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.config import RetryConfig
from mettle.records.tasks import DropReason, GroupRecord, RolloutRecord

ENVIRONMENT_KINDS = frozenset({"environment", "judge"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """`group` carries advantages. At most one of `drop` and `is_retried` is set; neither means admitted."""

    group: GroupRecord
    drop: DropReason | None = None
    is_retried: bool = False

    @property
    def is_admitted(self) -> bool:
        """True when the group is to be trained."""
        return self.drop is None and not self.is_retried


def judge_group(
    group: GroupRecord,
    algorithm: Algorithm,
    *,
    retry: RetryConfig,
    num_failures: int,
    filter_zero_advantages: bool,
) -> Verdict:
    """`num_failures` counts earlier failed attempts of the same task."""
    survivors = [r for r in group.rollouts if r.reward is not None]
    needed = max(algorithm.min_group_size, (len(group.rollouts) + 1) // 2)
    if len(survivors) < min(needed, len(group.rollouts)):
        kinds = {r.error_kind for r in group.rollouts if r.reward is None}
        is_worthwhile = bool(kinds & set(retry.retried)) and num_failures + 1 < retry.max_attempts
        return Verdict(group, None if is_worthwhile else DropReason.ERRORS, is_retried=is_worthwhile)
    if not any(r.num_completion_tokens for r in survivors):
        return Verdict(group, DropReason.NO_TOKENS)
    advantages = algorithm.advantages(group.draw.env_id, [r.reward for r in group.rollouts])
    rollouts = tuple(replace(r, advantage=a) for r, a in zip(group.rollouts, advantages, strict=True))
    scored = replace(group, rollouts=rollouts)
    if filter_zero_advantages and not any(advantages):
        return Verdict(scored, DropReason.ZERO_ADVANTAGE)
    return Verdict(scored)


def main_error(rollouts: Sequence[RolloutRecord]) -> tuple[str, str] | None:
    """(kind, message) of the most frequent kind of error, with its first message; None when nothing failed."""
    failed = [(r.error_kind, r.error or "") for r in rollouts if r.error_kind is not None]
    if not failed:
        return None
    kind = Counter(kind for kind, _ in failed).most_common(1)[0][0]
    return kind, next(message for found, message in failed if found == kind)


class FailureStreak:
    """Groups in a row in which the environment or its rewards failed every rollout."""

    def __init__(self) -> None:
        self.length = 0
        self.first_error = ""

    def observe(self, group: GroupRecord) -> int:
        """Take a finished group into account; returns the length of the streak. Other failures leave it alone."""
        failed = {r.error_kind for r in group.rollouts if r.reward is None}
        if len(group.rewards) > 0:
            self.length = 0
        elif failed and failed <= ENVIRONMENT_KINDS:
            found = main_error(group.rollouts)
            if self.length == 0 and found is not None:
                self.first_error = f"{found[0]}: {found[1]}"
            self.length += 1
        return self.length
