"""How far a running evaluation is: the few figures that a live display shows.

Parts: `Tally`. Invariant: counting a rollout and reading a figure cost the same whatever has been counted before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from mettle.clients.prices import Price
from mettle.evals.estimator import RunningMean
from mettle.evals.facts import RolloutFacts

WINDOW_S = 30.0


class Tally:
    """Counts of one evaluation. Rollouts that were taken over count as done, but not towards the pace."""

    def __init__(self, title: str, price: Price | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.title = title
        self.price = price
        self.total = 0
        self.num_done = self.num_errors = self.num_kept = 0
        self.input_tokens = self.output_tokens = 0.0
        self.is_over = False
        self._reward = RunningMean()
        self._is_counted = True
        self._clock = clock
        self._started = self._ended = clock()
        self._recent: deque[tuple[float, float]] = deque()
        self._recent_tokens = 0.0

    def start(self, total: int, kept: list[RolloutFacts]) -> None:
        """`total` rollouts in all, of which `kept` are done already."""
        self.total = total
        for facts in kept:
            self._count(facts)
        self.num_kept = len(kept)
        self._started = self._ended = self._clock()

    def add(self, facts: RolloutFacts) -> None:
        """One more rollout is done."""
        self._count(facts)
        self._ended = now = self._clock()
        tokens = facts.output_tokens or 0.0
        self._recent.append((now, tokens))
        self._recent_tokens += tokens
        self._forget(now)

    def finish(self) -> None:
        """No more rollouts will come."""
        self.is_over = True

    @property
    def avg_reward(self) -> float | None:
        """Mean over tasks of the rewards so far."""
        return self._reward.mean

    @property
    def cost_usd(self) -> float | None:
        """What was spent so far, taken-over rollouts included; None while it cannot be known."""
        if self.price is None or not self._is_counted or not self.num_done:
            return None
        return self.price.cost(self.input_tokens, self.output_tokens)["total_usd"]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens written a second: lately while it runs, over all of it afterwards."""
        if not self._recent and not self.is_over:
            return None
        now = self._clock()
        if self.is_over:
            elapsed = self._ended - self._started
            return (self.output_tokens / elapsed if elapsed > 0 else None) if not self.num_kept else None
        self._forget(now)
        return self._recent_tokens / max(1e-9, min(WINDOW_S, now - self._started))

    @property
    def rollouts_per_s(self) -> float | None:
        """Rollouts a second, over all that ended here; None before the first."""
        elapsed = (self._ended if self.is_over else self._clock()) - self._started
        num_new = self.num_done - self.num_kept
        return num_new / elapsed if num_new > 0 and elapsed > 0 else None

    @property
    def quiet_s(self) -> float:
        """Seconds since a rollout ended, or since the start."""
        return self._clock() - self._ended

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last rollout, at the pace so far."""
        num_new = self.num_done - self.num_kept
        elapsed = self._ended - self._started
        if num_new <= 0 or elapsed <= 0:
            return None
        return max(0.0, (self.total - self.num_done) * elapsed / num_new - (self._clock() - self._ended))

    def _count(self, facts: RolloutFacts) -> None:
        self.num_done += 1
        self._is_counted &= facts.output_tokens is not None or facts.cause is not None
        self.input_tokens += facts.input_tokens or 0.0
        self.output_tokens += facts.output_tokens or 0.0
        if facts.reward is None:
            self.num_errors += 1
        else:
            self._reward.add(facts.example_id, facts.reward)

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > WINDOW_S:
            self._recent_tokens -= self._recent.popleft()[1]
