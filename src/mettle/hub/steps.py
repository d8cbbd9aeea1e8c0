"""Figures by step that the ledger's own rows give, read incrementally while the run goes on.

A rollout counts for the step whose batch was being gathered when it was scored, whether its group was shipped or
dropped: rewards of shipped groups alone would leave out those that all succeeded.
Invariant: each rollout row is read once; a closed step is not computed again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass

from mettle.evals.estimator import mean_of, percentile
from mettle.storage.database import Database


@dataclass(frozen=True, slots=True)
class RewardSpread:
    """Rewards of a step."""

    mean: float
    p10: float
    p90: float
    num_rollouts: int


@dataclass(slots=True)
class StepFigures:
    """One step. Rates are tokens a second of wall time, None where there is no earlier step to measure from."""

    step: int
    shipped_at: float
    trained_at: float | None
    num_tokens: int
    staleness_mean: float
    staleness_max: int
    reward: RewardSpread | None = None
    num_sampled: int = 0
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
        self._last_row = 0
        self._waiting: deque[tuple[float, float | None, int]] = deque()
        self._num_closed = 0

    def refresh(self) -> None:
        """Read what has been added."""
        self._read_batches()
        self._read_rollouts()
        while self._num_closed < len(self.steps):
            self._close(self.steps[self._num_closed])
            self._num_closed += 1

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
            "SELECT rowid, kind, created_at, reward, num_tokens, error_kind FROM rollouts"
            " WHERE rowid > ? ORDER BY rowid",
            (self._last_row,),
        )
        for row in rows:
            self._last_row = row["rowid"]
            self.num_rollouts += 1
            if row["error_kind"] is not None:
                self.errors[row["error_kind"]] += 1
            if row["kind"] == "train":
                self._waiting.append((row["created_at"], row["reward"], row["num_tokens"]))

    def _close(self, figures: StepFigures) -> None:
        rewards: list[float] = []
        while self._waiting and self._waiting[0][0] <= figures.shipped_at:
            _, reward, num_tokens = self._waiting.popleft()
            figures.num_sampled += num_tokens
            if reward is not None and math.isfinite(reward):
                rewards.append(reward)
        if rewards:
            rewards.sort()
            figures.reward = RewardSpread(
                mean_of(rewards), percentile(rewards, 0.1), percentile(rewards, 0.9), len(rewards)
            )
        if self._num_closed > 0:
            elapsed = figures.shipped_at - self.steps[self._num_closed - 1].shipped_at
            figures.inference_tokens_per_s = rate(figures.num_sampled, elapsed)


def rate(count: int, elapsed_s: float) -> float | None:
    """`count` a second; None when nothing was counted or no time has passed."""
    return count / elapsed_s if elapsed_s > 0 and count > 0 else None
