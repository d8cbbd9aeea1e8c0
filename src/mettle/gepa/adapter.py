"""An environment as the `gepa` library sees one: a batch of rows and a candidate in, scores and examples out.

Parts: `EnvironmentAdapter`, `CandidateFailed`. Invariants: a rollout that failed has no reward, so it neither lowers
nor raises what a candidate is compared by, and its error is shown to the reflection; a batch of which fewer than half
came to a reward judges nobody. What the search draws at random is part of the adapter's state, so a resumed search goes
on as the killed one would have.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from mettle.errors import ServiceError
from mettle.gepa.guard import Guard
from mettle.gepa.journal import PromptAttempt, PromptJournal
from mettle.gepa.rollouts import Rollouts, SearchLoop, neutral, without_reward
from mettle.gepa.rows import Row

NamedRow = tuple[str, Row]
SAMPLER_FIELDS = ("shuffled_ids", "epoch", "last_trainset_size", "_current_iteration", "_calls_in_iteration")


class CandidateFailed(ServiceError):
    """Too few rollouts of a batch came to a reward to judge a candidate by it."""


class EnvironmentAdapter:
    """What `gepa.optimize` calls. `sampler` is the library's, whose place in the rows is part of our state."""

    propose_new_texts = None

    def __init__(
        self,
        loop: SearchLoop,
        rollouts: Rollouts,
        journal: PromptJournal,
        guard: Guard,
        rng: random.Random,
        sampler: Any,
    ) -> None:
        self._loop, self._rollouts, self._journal, self._guard = loop, rollouts, journal, guard
        self._rng, self._sampler = rng, sampler

    def evaluate(self, batch: Sequence[NamedRow], candidate: Mapping[str, str], capture_traces: bool = False) -> Any:
        """Score `candidate` on named rows.

        Raises: CandidateFailed when fewer than half of them came to a reward.
        """
        from gepa.core.adapter import EvaluationBatch

        with self._guard.watching("rollouts"):
            attempts = self._loop.run(self._rollouts.run(batch, candidate))
            _check(attempts)
        return EvaluationBatch(
            outputs=[{"row": attempt.row, "reward": attempt.reward, **attempt.record} for attempt in attempts],
            scores=neutral(attempts),
            trajectories=list(attempts) if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], eval_batch: Any, components_to_update: Sequence[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """The examples that reflection reads, the same for each component."""
        attempts: list[PromptAttempt] = eval_batch.trajectories
        return {name: [dict(attempt.record) for attempt in attempts] for name in components_to_update}

    def get_adapter_state(self) -> dict[str, Any]:
        """What a resumed search must know besides the library's state: plain data only."""
        sampler = {name: getattr(self._sampler, name) for name in SAMPLER_FIELDS}
        sampler["shuffled_ids"] = list(sampler["shuffled_ids"])
        return {"rng": self._rng.getstate(), "sampler": sampler, "counts": dict(self._journal.counts)}

    def set_adapter_state(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state; a new run has none."""
        if not state:
            return
        self._rng.setstate(state["rng"])
        for name, value in state["sampler"].items():
            setattr(self._sampler, name, value)
        self._journal.counts = dict(state["counts"])


def _check(attempts: Sequence[PromptAttempt]) -> None:
    failed = without_reward(attempts)
    if 2 * len(failed) > len(attempts) or len(failed) == len(attempts):
        raise CandidateFailed(
            f"{len(failed)} of {len(attempts)} rollouts came to no reward; the first failed with {failed[0].error}"
        )
