"""How far a search is, for whoever watches.

Parts: `SearchProgress`, `Watch` (the library's events as progress). Invariant: watching changes nothing; what goes
wrong in it is logged by the library and ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mettle.gepa.journal import PromptAttempt


@dataclass(slots=True)
class SearchProgress:
    """Figures of a running search; `stage` is "before", "search" or "after"."""

    max_calls: int
    stage: str = "before"
    num_rollouts: int = 0
    num_errors: int = 0
    num_calls: int = 0
    num_iterations: int = 0
    num_candidates: int = 0
    start_score: float | None = None
    best_score: float | None = None


class Watch:
    """Keeps `progress` and tells `show` of each change, and `say` of what is worth a line."""

    def __init__(
        self,
        max_calls: int,
        show: Callable[[SearchProgress], None],
        say: Callable[[str], None],
        on_best: Callable[[Mapping[str, str]], None],
    ) -> None:
        self.progress = SearchProgress(max_calls)
        self._show, self._say, self._on_best = show, say, on_best

    def stage(self, name: str) -> None:
        """Another part of the run begins."""
        self.progress.stage = name
        self._show(self.progress)

    def attempt(self, attempt: PromptAttempt) -> None:
        """A rollout ended."""
        self.progress.num_rollouts += 1
        self.progress.num_errors += attempt.reward is None
        self._show(self.progress)

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """The library knows what a candidate scores on the validation rows."""
        score = float(event["average_score"])
        self.progress.num_candidates = max(self.progress.num_candidates, int(event["candidate_idx"]) + 1)
        if event["candidate_idx"] == 0:
            self.progress.start_score = score
        best = self.progress.best_score
        if best is None or score > best:
            self.progress.best_score = score
            if event["candidate_idx"]:
                self._say(
                    f"candidate {event['candidate_idx']} scores {score:.4g} on the validation rows, the best so far"
                )
                self._on_best(event["candidate"])
        self._show(self.progress)

    def on_iteration_start(self, event: Mapping[str, Any]) -> None:
        """Another round of reflection begins."""
        state = event["state"]
        self.progress.num_iterations = int(state.i) + 1
        self.progress.num_calls = int(state.total_num_evals)
        averages = state.program_full_scores_val_set
        self.progress.num_candidates = len(averages)
        self.progress.best_score = max(averages)
        self._show(self.progress)

    def on_budget_updated(self, event: Mapping[str, Any]) -> None:
        """Calls were counted."""
        self.progress.num_calls = int(event["metric_calls_used"])
        self._show(self.progress)
