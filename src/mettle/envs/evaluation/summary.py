"""What an evaluation comes to: averages, error rate, pass@k.

Parts: `Summary` (grows with each finished rollout), `pass_at_k`, `pass_all_k`. Invariant: a rollout that failed is
counted in the error rate and in nothing else; with no scored rollout there is no average.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import comb
from typing import Any


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k rollouts is correct. Source: arXiv 2107.03374."""
    return 1.0 - comb(num_rollouts - num_correct, k) / comb(num_rollouts, k)


def pass_all_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that all of k rollouts are correct."""
    return comb(num_correct, k) / comb(num_rollouts, k)


class Summary:
    """Running sums over rollouts."""

    def __init__(self, rollouts_per_example: int, pass_threshold: float) -> None:
        self.rollouts_per_example = rollouts_per_example
        self.pass_threshold = pass_threshold
        self.num_rollouts = 0
        self.num_errors = 0
        self._rewards = 0.0
        self._metrics: dict[str, tuple[float, int]] = {}
        self._usage: dict[str, float] = {}
        self._num_with_usage = 0
        self._by_example: dict[Any, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, output: Mapping[str, Any]) -> None:
        """Count one rollout."""
        self.num_rollouts += 1
        usage = output.get("token_usage")
        if usage:
            self._num_with_usage += 1
            for name, value in usage.items():
                self._usage[name] = self._usage.get(name, 0.0) + value
        reward = output.get("reward")
        if output.get("error") is not None or reward is None:
            self.num_errors += 1
            return
        self._rewards += reward
        for name, value in (output.get("metrics") or {}).items():
            total, count = self._metrics.get(name, (0.0, 0))
            self._metrics[name] = (total + value, count + 1)
        counts = self._by_example[output["example_id"]]
        counts[0] += 1
        counts[1] += reward >= self.pass_threshold

    def metadata(self) -> dict[str, Any]:
        """The summary's part of the metadata."""
        num_scored = self.num_rollouts - self.num_errors
        return {
            "avg_reward": self._rewards / num_scored if num_scored else None,
            "avg_metrics": {name: total / count for name, (total, count) in self._metrics.items()},
            "avg_error": self.num_errors / self.num_rollouts if self.num_rollouts else 0.0,
            **self._passes(),
            "pass_threshold": self.pass_threshold,
            "usage": self._average_usage(),
        }

    def _passes(self) -> dict[str, dict[str, float]]:
        complete = [tuple(counts) for counts in self._by_example.values() if counts[0] == self.rollouts_per_example]
        at_least_one: dict[str, float] = {}
        all_of_them: dict[str, float] = {}
        k = 1
        while complete and k <= self.rollouts_per_example:
            at_least_one[str(k)] = sum(pass_at_k(n, c, k) for n, c in complete) / len(complete)
            all_of_them[str(k)] = sum(pass_all_k(n, c, k) for n, c in complete) / len(complete)
            k *= 2
        return {"pass_at_k": at_least_one, "pass_all_k": all_of_them}

    def _average_usage(self) -> dict[str, float] | None:
        if not self._num_with_usage:
            return None
        return {name: value / self._num_with_usage for name, value in self._usage.items()}
