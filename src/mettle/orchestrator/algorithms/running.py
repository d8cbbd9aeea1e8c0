"""Running moments of an environment's rewards, for algorithms whose scale is not that of one group.

Mean and second moment are averages in which a reward counts `decay` times what the next one does, corrected for how few
there were, so the first is its own mean. Invariant: what `state` gives is JSON and `restore` takes it back unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


class RunningMoments:
    """Mean and standard deviation by name, as far as rewards have been seen."""

    def __init__(self, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be in [0, 1), not {decay}")
        self._decay = decay
        self._sums: dict[str, list[float]] = {}  # weight, weighted sum, weighted sum of squares

    def observe(self, name: str, values: Sequence[float]) -> tuple[float, float]:
        """Take values into account; returns the mean and the standard deviation with them."""
        weight, first, second = self._sums.get(name, [0.0, 0.0, 0.0])
        # The values of a group count alike: which of them came first is chance.
        kept = self._decay ** len(values)
        added = (1.0 - kept) / len(values) if values else 0.0
        weight = kept * weight + added * len(values)
        first = kept * first + added * math.fsum(values)
        second = kept * second + added * math.fsum(value * value for value in values)
        self._sums[name] = [weight, first, second]
        if not weight:
            return 0.0, 0.0
        mean = first / weight
        return mean, math.sqrt(max(0.0, second / weight - mean * mean))

    def state(self) -> dict[str, Any]:
        """The sums by name."""
        return {"moments": {name: list(sums) for name, sums in self._sums.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the sums."""
        self._sums = {str(name): [float(v) for v in sums] for name, sums in state.get("moments", {}).items()}
