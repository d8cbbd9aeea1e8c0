"""When a rollout has passed: from which value of what.

Parts: `PassRule`. What is compared with the threshold is the correctness reward: the weighted sum of the metrics that
say whether the answer is right. What is paid for the form of an answer is no part of it, so that a wrong answer in the
right form cannot pass. Invariants: without weights, and for a rollout that lacks one of the metrics (files of other
tools), it is the reward; a rollout without a reward has not passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self


class Scored(Protocol):
    """What a rule looks at: the figures of a rollout."""

    @property
    def reward(self) -> float | None: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class PassRule:
    """A rollout passes from `threshold` on. `weights`: of the metrics that make the correctness reward."""

    threshold: float = 0.5
    weights: Mapping[str, float] | None = None

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """The rule that an evaluation was saved with; what is not readable there is as if it were not there."""
        threshold, weights = metadata.get("pass_threshold"), metadata.get("pass_on")
        is_known = isinstance(weights, Mapping) and weights and all(map(_is_number, weights.values()))
        return cls(
            float(threshold) if isinstance(threshold, int | float) else 0.5,
            {str(name): float(weight) for name, weight in weights.items()} if is_known and weights else None,
        )

    def correctness(self, scored: Scored) -> float | None:
        """The value that is compared with the threshold; None for a rollout without a reward."""
        if scored.reward is None or not self.weights:
            return scored.reward
        metrics = scored.metrics
        if any(name not in metrics for name in self.weights):
            return scored.reward
        return sum(weight * metrics[name] for name, weight in self.weights.items())

    def holds(self, scored: Scored) -> bool:
        """True when the rollout has passed."""
        value = self.correctness(scored)
        return value is not None and value >= self.threshold

    @property
    def what(self) -> str:
        """What is compared, in words: `reward`, or the names of the metrics."""
        return " + ".join(self.weights) if self.weights else "reward"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
