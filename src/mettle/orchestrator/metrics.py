"""Figures of a step: collected while groups come in, written to the journal when the batch is shipped.

Parts: `StepStats` (groups that finished since the last batch, whether they train or not), `LoopLag` (how late the event
loop runs). Rewards are those of all groups that finished: leaving out groups without signal would bend the curve.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence

from mettle.evals.estimator import mean_of, percentile, spread
from mettle.inference.engine.protocol import WeightUpdate
from mettle.orchestrator.credit import EQUAL_WITHIN, are_equal
from mettle.processes.beats import Heartbeat
from mettle.records.tasks import DropReason, GroupRecord, RolloutRecord

LAG_PROBE_S = 0.1
TOO_LONG = "rollouts/too_long_rate"
"""Share of rollouts whose ends don't train, because they are longer than a sample may be."""


class StepStats:
    """What happened since the last shipped batch. Of a rollout at most `seq_len` tokens train."""

    def __init__(self, started_at: float, seq_len: int) -> None:
        self.started_at = started_at
        self._seq_len = seq_len
        self._rewards: list[float] = []
        self._by_env: defaultdict[str, list[float]] = defaultdict(list)
        self._parts: defaultdict[str, list[float]] = defaultdict(list)
        self._error_kinds: Counter[str] = Counter()
        self._num_rollouts = 0
        self._num_truncated = self._num_too_long = 0
        self._num_tokens = 0
        self._groups: Counter[str] = Counter()
        self._drops: Counter[DropReason] = Counter()
        self.num_stale = self.num_cut_short = 0

    def observe(self, group: GroupRecord, drop: DropReason | None) -> None:
        """Take a finished group into account."""
        rewards = group.rewards
        self._rewards += rewards
        self._by_env[group.draw.env_id] += rewards
        self._groups["all"] += 1
        if drop is not None:
            self._drops[drop] += 1
        if rewards and are_equal(rewards):
            self._groups["solved_none"] += rewards[0] <= EQUAL_WITHIN
            self._groups["solved_all"] += rewards[0] >= 1.0 - EQUAL_WITHIN
        for rollout in group.rollouts:
            self._num_rollouts += 1
            self._num_truncated += rollout.is_truncated
            self._num_too_long += longest_sequence(rollout) > self._seq_len
            self._num_tokens += rollout.num_completion_tokens
            if rollout.error_kind is not None:
                self._error_kinds[rollout.error_kind] += 1
            for name, value in rollout.metrics.items():
                self._parts[name].append(value)

    def observe_errors(self, group: GroupRecord) -> None:
        """A group that will be tried again: only its errors count here."""
        for rollout in group.rollouts:
            self._num_rollouts += 1
            if rollout.error_kind is not None:
                self._error_kinds[rollout.error_kind] += 1

    def figures(self, now: float) -> dict[str, float]:
        """The metrics of the step so far."""
        elapsed = max(now - self.started_at, 1e-9)
        num_groups = max(1, self._groups["all"])
        num_rollouts = max(1, self._num_rollouts)
        found = {
            "rollouts/error_rate": sum(self._error_kinds.values()) / num_rollouts,
            "rollouts/truncated_rate": self._num_truncated / num_rollouts,
            TOO_LONG: self._num_too_long / num_rollouts,
            "rollouts/tokens_mean": self._num_tokens / num_rollouts,
            "rollouts/per_s": self._num_rollouts / elapsed,
            "groups/finished": float(self._groups["all"]),
            "groups/solved_all": self._groups["solved_all"] / num_groups,
            "groups/solved_none": self._groups["solved_none"] / num_groups,
            "groups/zero_advantage": self._drops[DropReason.ZERO_ADVANTAGE] / num_groups,
            "groups/filtered": (self._drops[DropReason.DIFFICULTY] + self._drops[DropReason.SMALL_ADVANTAGE])
            / num_groups,
            "staleness/dropped": float(self.num_stale),
            "staleness/cut_short": float(self.num_cut_short),
            "throughput/inference_tokens_per_s": self._num_tokens / elapsed,
            "time/gather_s": elapsed,
        }
        for kind, count in self._error_kinds.items():
            found[f"errors/{kind}"] = count / num_rollouts
        if self._rewards:
            ordered = sorted(self._rewards)
            seen = spread(ordered)
            found |= {
                "reward/mean": mean_of(ordered),
                "reward/std": seen.std if seen is not None and seen.std is not None else 0.0,
                "reward/p10": percentile(ordered, 0.1),
                "reward/p90": percentile(ordered, 0.9),
            }
        found |= {f"reward/{name}": mean_of(values) for name, values in self._by_env.items() if values}
        found |= {f"reward_parts/{name}": mean_of(values) for name, values in self._parts.items()}
        return found


def longest_sequence(rollout: RolloutRecord) -> int:
    """Tokens of the longest sequence that the policy has seen and said in a rollout."""
    ends = (turn.prefix_length + len(turn.new_prompt_ids) + len(turn.completion_ids) for turn in rollout.turns)
    return max(ends, default=0)


def update_figures(updates: Sequence[WeightUpdate]) -> dict[str, float]:
    """Metrics of the engine's weight updates since the last batch: the slowest, and the worst canary."""
    if not updates:
        return {}
    found = {"weights/update_ms": max(update.update_ms for update in updates)}
    canaries = [update.canary for update in updates if update.canary is not None]
    if canaries:
        found["canary/mean_abs_diff"] = max(canary.mean_abs_diff for canary in canaries)
        found["canary/max_abs_diff"] = max(canary.max_abs_diff for canary in canaries)
    return found


class LoopLag:
    """How much later than asked for the event loop wakes a sleeper; `heart` is told that it does."""

    def __init__(self, heart: Heartbeat) -> None:
        self._heart = heart
        self._max_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._heart.tick()
                started = loop.time()
                await asyncio.sleep(LAG_PROBE_S)
                self._max_s = max(self._max_s, loop.time() - started - LAG_PROBE_S)
        finally:
            self._heart.rest()

    def take_max_ms(self) -> float:
        """The worst lag since the last call, in milliseconds."""
        worst, self._max_s = self._max_s, 0.0
        return worst * 1000.0
