"""Figures by step that the ledger's own rows give, read incrementally while the run goes on.

A rollout counts for the step whose batch was being gathered when it was scored, whether its group was shipped or
dropped: rewards of shipped groups alone would leave out those that all succeeded.
Invariant: each rollout row is read once; a closed step is not computed again.
Parts: `StepTable`; `GatheredRollouts`, the rollouts of a step added up; `ErrorCause`, what fails and how often.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from mettle.evals.estimator import mean_of, percentile
from mettle.storage.database import Database


@dataclass(frozen=True, slots=True)
class RewardSpread:
    """Rewards of a step."""

    mean: float
    p10: float
    p90: float
    num_rollouts: int


PASSED = 1.0 - 1e-6
"""A rollout with this reward or more has solved its task."""
MAX_CAUSES = 200
"""Kinds of errors that are told apart; more are counted with the last."""
CAUSE_CHARS = 160


class ScoredRollout(NamedTuple):
    """What a step's figures need of a rollout. `reward` is None when it failed."""

    created_at: float
    draw_id: int | None
    reward: float | None
    num_tokens: int
    is_truncated: bool


@dataclass(slots=True)
class ErrorCause:
    """Rollouts that failed at one boundary with one type of error; `newest` is what the last of them said."""

    kind: str
    type: str
    num_rollouts: int = 0
    newest: str = ""


@dataclass(slots=True)
class StepFigures:
    """One step. Rates are tokens a second of wall time, None where there is no earlier step to measure from.

    `length_mean` is in sampled tokens a rollout; `truncated_rate` and `error_rate` are shares of the step's rollouts;
    `pass_at_1` is the share of the scored rollouts that have the full reward, `pass_at_group` that of the groups in
    which one has.
    """

    step: int
    shipped_at: float
    trained_at: float | None
    num_tokens: int
    staleness_mean: float
    staleness_max: int
    reward: RewardSpread | None = None
    num_sampled: int = 0
    length_mean: float | None = None
    truncated_rate: float | None = None
    error_rate: float | None = None
    pass_at_1: float | None = None
    pass_at_group: float | None = None
    inference_tokens_per_s: float | None = None
    training_tokens_per_s: float | None = None


class StepTable:
    """The steps of one run so far, and the totals over its rollouts."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.reset()

    def reset(self) -> None:
        """Forget everything, so that the next `refresh` reads it anew."""
        self.steps: list[StepFigures] = []
        self.num_rollouts = 0
        self.errors: Counter[str] = Counter()
        self.causes: dict[tuple[str, str], ErrorCause] = {}
        self.staleness: Counter[int] = Counter()
        """Trained tokens by the versions between the oldest of their rollout and the step that took it."""
        self._last_row = 0
        self._last_aged = 0
        self._waiting: deque[ScoredRollout] = deque()
        self._num_closed = 0

    def refresh(self) -> None:
        """Read what has been added."""
        self._read_batches()
        self._read_rollouts()
        while self._num_closed < len(self.steps):
            self._close(self.steps[self._num_closed])
            self._num_closed += 1
        self._read_ages()

    def _read_batches(self) -> None:
        untrained = next((f.step for f in self.steps if f.trained_at is None), None)
        newest = self.steps[-1].step if self.steps else 0
        rows = self._database.rows(
            "SELECT step, shipped_at, trained_at, num_tokens, staleness_mean, staleness_max FROM batches"
            " WHERE step >= ? ORDER BY step",
            (newest + 1 if untrained is None else untrained,),
        )
        known = {figures.step: figures for figures in self.steps[-len(rows) - 64 :]}
        for row in rows:
            figures = known.get(row["step"])
            if figures is None:
                figures = StepFigures(**dict(row))
                known[figures.step] = figures
                self.steps.append(figures)
            previous = known.get(figures.step - 1)
            if row["trained_at"] is not None and figures.training_tokens_per_s is None:
                figures.trained_at = row["trained_at"]
                if previous is not None and previous.trained_at is not None:
                    figures.training_tokens_per_s = rate(figures.num_tokens, row["trained_at"] - previous.trained_at)

    def _read_rollouts(self) -> None:
        rows = self._database.rows(
            "SELECT rowid, kind, created_at, draw_id, reward, num_tokens, is_truncated, error_kind, error_type,"
            " CASE WHEN error_kind IS NULL THEN NULL ELSE error END AS error FROM rollouts WHERE rowid > ?"
            " ORDER BY rowid",
            (self._last_row,),
        )
        for row in rows:
            self._last_row = row["rowid"]
            self.num_rollouts += 1
            if row["error_kind"] is not None:
                self._count_error(row["error_kind"], row["error_type"] or "", row["error"] or "")
            if row["kind"] == "train":
                self._waiting.append(
                    ScoredRollout(
                        row["created_at"], row["draw_id"], row["reward"], row["num_tokens"], bool(row["is_truncated"])
                    )
                )

    def _count_error(self, kind: str, named: str, words: str) -> None:
        self.errors[kind] += 1
        if not named and ":" in words[:80]:  # the record of an older run has the type before its words alone
            named, _, words = words.partition(":")
        key = (kind, named.strip()[:80])
        if key not in self.causes and len(self.causes) >= MAX_CAUSES:
            key = next(reversed(self.causes))
        cause = self.causes.setdefault(key, ErrorCause(*key))
        cause.num_rollouts += 1
        cause.newest = " ".join(words[: 3 * CAUSE_CHARS].split())[:CAUSE_CHARS]

    def _read_ages(self) -> None:
        """A rollout gets its step when its batch is shipped, so that each shipped step is looked up once."""
        newest = self.steps[-1].step if self.steps else 0
        if newest <= self._last_aged:
            return
        rows = self._database.rows(
            "SELECT step - 1 - version_min AS age, sum(num_tokens) AS tokens FROM rollouts"
            " WHERE kind = 'train' AND step > ? AND step <= ? AND version_min >= 0 GROUP BY age",
            (self._last_aged, newest),
        )
        for row in rows:
            self.staleness[max(0, row["age"])] += row["tokens"]
        self._last_aged = newest

    def _close(self, figures: StepFigures) -> None:
        gathered = GatheredRollouts()
        while self._waiting and self._waiting[0].created_at <= figures.shipped_at:
            gathered.add(self._waiting.popleft())
        gathered.fill(figures)
        if self._num_closed > 0:
            elapsed = figures.shipped_at - self.steps[self._num_closed - 1].shipped_at
            figures.inference_tokens_per_s = rate(figures.num_sampled, elapsed)


@dataclass(slots=True)
class GatheredRollouts:
    """The rollouts of one step, added up."""

    rewards: list[float] = field(default_factory=list)
    solved: dict[int | None, bool] = field(default_factory=dict)
    """By task draw, whether one of its rollouts has the full reward."""
    num_rollouts: int = 0
    num_failed: int = 0
    num_truncated: int = 0
    num_tokens: int = 0

    def add(self, rollout: ScoredRollout) -> None:
        self.num_rollouts += 1
        self.num_truncated += rollout.is_truncated
        self.num_tokens += rollout.num_tokens
        if rollout.reward is None:
            self.num_failed += 1
        elif math.isfinite(rollout.reward):
            self.rewards.append(rollout.reward)
            is_solved = rollout.reward >= PASSED
            self.solved[rollout.draw_id] = self.solved.get(rollout.draw_id, False) or is_solved

    def fill(self, figures: StepFigures) -> None:
        figures.num_sampled = self.num_tokens
        if self.num_rollouts:
            figures.length_mean = self.num_tokens / self.num_rollouts
            figures.truncated_rate = self.num_truncated / self.num_rollouts
            figures.error_rate = self.num_failed / self.num_rollouts
        if self.rewards:
            self.rewards.sort()
            low, high = percentile(self.rewards, 0.1), percentile(self.rewards, 0.9)
            figures.reward = RewardSpread(mean_of(self.rewards), low, high, len(self.rewards))
            figures.pass_at_1 = sum(reward >= PASSED for reward in self.rewards) / len(self.rewards)
            figures.pass_at_group = sum(self.solved.values()) / len(self.solved)


def rate(count: int, elapsed_s: float) -> float | None:
    """`count` a second; None when nothing was counted or no time has passed."""
    return count / elapsed_s if elapsed_s > 0 and count > 0 else None
