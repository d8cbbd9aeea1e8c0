"""Groups that wait to be shipped, and the batch that they make. A pure state machine.

Invariants: a batch consists of whole groups, `groups_per_batch` of them unless many of those rolled out for it carried
no signal; none holds a token staler than `max_staleness` at the step that trains it; the stalest groups leave first. A
batch stands in the order of its draws, whichever group came back first.
`Starvation` ends a run in which nothing more can be learnt, and says why.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from mettle.errors import UserError
from mettle.orchestrator.credit import are_equal
from mettle.records.tasks import DropReason, GroupRecord
from mettle.records.tokens import Sample
from mettle.records.versions import staleness


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A scored group reduced to what trains. `version` is the oldest among its sampled tokens."""

    draw_id: int
    version: int
    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, draw_id: int, samples: list[Sample]) -> ReadyGroup:
        """From samples, of which there must be one at least."""
        return cls(draw_id, min(sample.oldest_version for sample in samples), tuple(samples))


class Batcher:
    """Ready groups in the order in which they should be trained."""

    def __init__(self, groups_per_batch: int, max_staleness: int, *, max_backfill: float) -> None:
        self.groups_per_batch = groups_per_batch
        self._max_staleness = max_staleness
        self._max_rejected = max(1.0, max_backfill * groups_per_batch)
        self._num_rejected = 0
        self._ready: list[ReadyGroup] = []

    @property
    def num_ready(self) -> int:
        """Groups that wait."""
        return len(self._ready)

    @property
    def num_rejected(self) -> int:
        """Groups that were rolled out for the next batch and carry no signal."""
        return self._num_rejected

    @property
    def num_wanted(self) -> int:
        """Groups that the next batch wants.

        All of them as long as the groups without signal can be replaced one for one; past `max_backfill` in inverse
        proportion to the number of those, so that a policy that solves most tasks is not sampled for ever for a few.
        """
        share = self._max_rejected / max(self._max_rejected, self._num_rejected)
        return max(1, math.ceil(self.groups_per_batch * share))

    @property
    def has_batch(self) -> bool:
        """True when there are enough groups for a batch."""
        return len(self._ready) >= self.num_wanted

    def add(self, group: ReadyGroup) -> None:
        """One more group waits."""
        self._ready.append(group)

    def reject(self, number: int = 1) -> None:
        """Groups that were rolled out for the next batch carry no signal."""
        self._num_rejected += number

    def sweep(self, step: int) -> list[ReadyGroup]:
        """Remove and return the groups that are too stale to be trained at `step` or later."""
        stale = [group for group in self._ready if staleness(step, group.version) > self._max_staleness]
        if stale:
            gone = {group.draw_id for group in stale}
            self._ready = [group for group in self._ready if group.draw_id not in gone]
        return stale

    def take(self) -> list[ReadyGroup]:
        """Remove and return a batch: the stalest groups, in the order of their draws."""
        assert self.has_batch, f"a batch wants {self.num_wanted} groups, {len(self._ready)} are ready"
        self._num_rejected = 0
        self._ready.sort(key=lambda group: (group.version, group.draw_id))
        taken, self._ready = self._ready[: self.groups_per_batch], self._ready[self.groups_per_batch :]
        return sorted(taken, key=lambda group: group.draw_id)


class Starvation:
    """Counts groups in a row that gave nothing to train on."""

    def __init__(self, groups_per_batch: int, max_empty_batches: int, *, solved_reward: float) -> None:
        self._groups_per_batch = groups_per_batch
        self._max_groups = groups_per_batch * max_empty_batches
        self._solved_reward = solved_reward
        self._has_warned = False
        self.is_solved = False
        self._reset()

    def _reset(self) -> None:
        self._num_groups = 0
        self._reasons: Counter[DropReason] = Counter()
        self._num_rollouts = 0
        self._num_truncated = 0
        self._num_equal = 0
        self._num_cut_off = 0
        self._rewards_sum = 0.0
        self._num_rewards = 0
        self._failure = ""

    def observe(self, group: GroupRecord, drop: DropReason | None, failure: str = "") -> str | None:
        """Take a finished group into account; `failure` is what kept its algorithm from crediting it.

        Returns a warning the first time a batch's worth came to nothing. At the limit `is_solved` says that the tasks
        are, as far as their rewards tell.
        Raises: UserError at the limit when they are not.
        """
        if drop is None:
            self._reset()
            return None
        self._num_groups += 1
        self._reasons[drop] += 1
        self._num_rollouts += len(group.rollouts)
        self._num_truncated += sum(r.is_truncated for r in group.rollouts)
        if drop is DropReason.ZERO_ADVANTAGE:
            self._num_equal += are_equal(group.rewards)
        if drop is DropReason.NO_TOKENS:
            self._num_cut_off += any(r.num_completion_tokens for r in group.rollouts)
        self._failure = failure or self._failure
        self._rewards_sum += sum(group.rewards)
        self._num_rewards += len(group.rewards)
        if self._num_groups >= self._max_groups:
            self.is_solved = self._is_high()
            if not self.is_solved:
                raise UserError(f"{self._why()}, so there is nothing to learn from: {self._advice()}")
        if self._num_groups < self._groups_per_batch or self._has_warned or self._is_high():
            return None
        self._has_warned = True
        return f"{self._why()}: {self._advice()}"

    def _is_high(self) -> bool:
        return self._num_rewards > 0 and self._rewards_sum >= self._solved_reward * self._num_rewards

    def _why(self) -> str:
        reasons, cut_off = self._reasons, self._num_cut_off
        mean = f"{self._rewards_sum / self._num_rewards:.3g}" if self._num_rewards else "none"
        told = [
            (self._num_equal, f"had equal rewards (mean {mean})"),
            (reasons[DropReason.ZERO_ADVANTAGE] - self._num_equal, f"got no credit by their algorithm (mean {mean})"),
            (self._num_filtered, "were filtered by the curriculum"),
            (reasons[DropReason.ERRORS], "failed" + (f" (the last: {self._failure})" if self._failure else "")),
            (reasons[DropReason.NO_TOKENS] - cut_off, "sampled no token"),
            (cut_off, "sampled none within seq_len"),
        ]
        shares = [f"{number / self._num_groups:.0%} {what}" for number, what in told if number]
        truncated = self._num_truncated / max(1, self._num_rollouts)
        return (
            f"the last {self._num_groups} groups ({self._num_groups // self._groups_per_batch} batches' worth) gave "
            f"nothing to train on: {', '.join(shares)}; {truncated:.0%} of the rollouts were cut at max_tokens"
        )

    @property
    def _num_filtered(self) -> int:
        return self._reasons[DropReason.DIFFICULTY] + self._reasons[DropReason.SMALL_ADVANTAGE]

    def _advice(self) -> str:
        if self._reasons[DropReason.ERRORS] * 2 > self._num_groups:
            return "see to that model" if self._failure else "look at the errors of the rollouts on the run page"
        if self._reasons[DropReason.NO_TOKENS] * 2 > self._num_groups:
            which = "orchestrator.seq_len" if self._num_cut_off else "inference.max_model_len"
            return f"the prompts leave no room for an answer: raise {which}, or take shorter prompts"
        if self._num_truncated * 2 > self._num_rollouts:
            return "raise sampling.max_tokens"
        if self._num_filtered * 2 > self._num_groups:
            return "open the curriculum's admit_above, admit_below or min_advantage"
        if (self._reasons[DropReason.ZERO_ADVANTAGE] - self._num_equal) * 2 > self._num_groups:
            return "look at what the algorithm asks of a rollout (algorithm_args), or take another"
        return "take tasks that the model solves sometimes, warm it up first, or raise group_size"
