"""How many groups may be open, so that staleness stays bounded while little is thrown away.

Batch s trains v{s-1}, so a token of version k in it has staleness (s-1)-k. A group opened now, under acknowledged
version v, with q groups ready or running before it and G groups a batch, lands at the latest in batch
s + floor(q / G), where s is the next batch to ship. Its staleness is at most S exactly when q < (S + v + 2 - s) * G.

The same formula with two bounds: S = `max_lag` is what the dispatch aims at, where running groups count only by the
share that is expected to be admitted (the rest will be dropped for zero advantage and would leave the batch short);
S = `max_staleness` is never exceeded, where each counts in full. Source: the capacity of SkyRL and AReaL.
"""

from __future__ import annotations

import math

from mettle.orchestrator.config import OrchestratorConfig


class Room:
    """The room of one run. It keeps a moving average of the share of groups that carry a signal."""

    def __init__(
        self,
        *,
        max_steps: int,
        groups_per_batch: int,
        max_lag: int,
        max_staleness: int,
        max_backfill: float,
        decay: float = 0.95,
    ) -> None:
        self._max_steps = max_steps
        self._groups_per_batch = groups_per_batch
        self._max_lag = max_lag
        self._max_staleness = max_staleness
        # What is opened beyond this share could not be shipped with the batch it is meant for.
        self._min_share = 1.0 / (1.0 + max_backfill)
        self._decay = decay
        self.admitted_share = 1.0

    @classmethod
    def of(cls, config: OrchestratorConfig) -> Room:
        """As a run is configured."""
        return cls(
            max_steps=config.max_steps,
            groups_per_batch=config.groups_per_batch,
            max_lag=config.max_lag,
            max_staleness=config.max_staleness,
            max_backfill=config.max_backfill,
        )

    def for_groups(self, *, step: int, version: int, num_ready: int, num_running: int) -> int:
        """Groups that may be opened now; `step` is the next batch to ship, `version` the one that the engine serves."""
        share = max(self._min_share, min(1.0, self.admitted_share))
        steps_allowed = min(self._max_lag + version + 2 - step, self._max_steps - step + 1)
        aimed = (steps_allowed * self._groups_per_batch - num_ready) / share - num_running
        bound = (self._max_staleness + version + 2 - step) * self._groups_per_batch - num_ready - num_running
        return max(0, min(math.ceil(aimed), bound))

    def observe(self, *, is_admitted: bool) -> None:
        """One group was finished."""
        self.admitted_share = self._decay * self.admitted_share + (1.0 - self._decay) * float(is_admitted)
