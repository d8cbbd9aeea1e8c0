"""The running figures of an evaluation, and its part of the published metadata.

Parts: `Summary` (grows with each finished rollout). Invariants: a rollout that failed is counted in the error rate and
in nothing else; with no scored rollout there is no average; adding a rollout and reading the summary cost the same
after ten thousand rollouts as after one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mettle.clients.prices import Price
from mettle.evals.estimator import RunningMean, pass_all_k, pass_at_k, powers_of_two
from mettle.evals.facts import RolloutFacts
from mettle.evals.passing import PassRule


class Summary:
    """Running sums over rollouts."""

    def __init__(
        self,
        rollouts_per_example: int,
        pass_threshold: float,
        price: Price | None = None,
        pass_on: Mapping[str, float] | None = None,
    ) -> None:
        self.rollouts_per_example = rollouts_per_example
        self.rule = PassRule(pass_threshold, pass_on)
        self.price = price
        self.num_rollouts = 0
        self.num_errors = 0
        self.input_tokens = self.output_tokens = 0.0
        self._reward = RunningMean()
        self._metrics: dict[str, RunningMean] = {}
        self._usage: dict[str, float] = {}
        self._num_with_usage = self._num_without_usage = 0
        self._by_example: dict[Any, tuple[int, int]] = {}
        self._num_complete = 0
        self._passes = {k: (0.0, 0.0) for k in powers_of_two(rollouts_per_example)}

    @property
    def avg_reward(self) -> float | None:
        """Mean over tasks of the rewards so far."""
        return self._reward.mean

    @property
    def cost(self) -> dict[str, float] | None:
        """What the rollouts so far cost; None while a price or a token count is not known."""
        if self.price is None or not self._num_with_usage or self._num_without_usage:
            return None
        return self.price.cost(self.input_tokens, self.output_tokens)

    def add(self, facts: RolloutFacts, usage: Mapping[str, float] | None = None) -> None:
        """Count one rollout, whose saved token usage is `usage`."""
        self.num_rollouts += 1
        self._count_usage(facts, usage)
        if facts.reward is None:
            self.num_errors += 1
            return
        self._reward.add(facts.example_id, facts.reward)
        for name, value in facts.metrics.items():
            self._metrics.setdefault(name, RunningMean()).add(facts.example_id, value)
        self._count_pass(facts)

    def metadata(self) -> dict[str, Any]:
        """The summary's part of the metadata."""
        cost = self.cost
        return {
            "avg_reward": self.avg_reward,
            "avg_metrics": {name: running.mean for name, running in self._metrics.items()},
            "avg_error": self.num_errors / self.num_rollouts if self.num_rollouts else 0.0,
            "pass_at_k": self._averages(at_least_one for at_least_one, _ in self._passes.values()),
            "pass_all_k": self._averages(all_of_them for _, all_of_them in self._passes.values()),
            "pass_threshold": self.rule.threshold,
            **({"pass_on": dict(self.rule.weights)} if self.rule.weights else {}),
            "usage": self._average_usage(),
            **({"cost": cost} if cost is not None else {}),
        }

    def _count_usage(self, facts: RolloutFacts, usage: Mapping[str, float] | None) -> None:
        if facts.output_tokens is None:
            self._num_without_usage += facts.cause is None
            return
        self._num_with_usage += 1
        self.input_tokens += facts.input_tokens or 0.0
        self.output_tokens += facts.output_tokens
        for name, value in (usage or {}).items():
            self._usage[name] = self._usage.get(name, 0.0) + value

    def _count_pass(self, facts: RolloutFacts) -> None:
        """A task enters pass@k when the last of its rollouts is scored, as in the published format."""
        assert facts.reward is not None, "only a scored rollout passes or fails"
        num, num_correct = self._by_example.get(facts.example_id, (0, 0))
        num, num_correct = num + 1, num_correct + self.rule.holds(facts)
        self._by_example[facts.example_id] = num, num_correct
        if num != self.rollouts_per_example:
            return
        self._num_complete += 1
        for k, (at_least_one, all_of_them) in self._passes.items():
            self._passes[k] = (
                at_least_one + pass_at_k(num, num_correct, k),
                all_of_them + pass_all_k(num, num_correct, k),
            )

    def _averages(self, sums: Iterable[float]) -> dict[str, float]:
        if not self._num_complete:
            return {}
        return {str(k): value / self._num_complete for k, value in zip(self._passes, sums, strict=True)}

    def _average_usage(self) -> dict[str, float] | None:
        if not self._num_with_usage:
            return None
        return {name: value / self._num_with_usage for name, value in self._usage.items()}
