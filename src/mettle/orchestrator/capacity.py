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


def room_for_groups(
    *,
    step: int,
    version: int,
    max_steps: int,
    groups_per_batch: int,
    num_ready: int,
    num_running: int,
    admitted_share: float,
    min_share: float,
    max_lag: int,
    max_staleness: int,
) -> int:
    """Groups that may be opened now; `step` is the next batch to ship, `version` the one acknowledged by the engine.

    `min_share` bounds the oversampling: what is opened beyond it could not be shipped with the batch it is meant for.
    """
    share = max(min_share, min(1.0, admitted_share))
    steps_allowed = min(max_lag + version + 2 - step, max_steps - step + 1)
    aimed = (steps_allowed * groups_per_batch - num_ready) / share - num_running
    bound = (max_staleness + version + 2 - step) * groups_per_batch - num_ready - num_running
    return max(0, min(math.ceil(aimed), bound))


class AdmittedShare:
    """A moving average of the share of groups that carry a signal."""

    def __init__(self, *, decay: float = 0.95) -> None:
        self._decay = decay
        self._share = 1.0

    @property
    def value(self) -> float:
        """The share, between 0 and 1."""
        return self._share

    def observe(self, *, is_admitted: bool) -> None:
        """One group was finished."""
        self._share = self._decay * self._share + (1.0 - self._decay) * float(is_admitted)
