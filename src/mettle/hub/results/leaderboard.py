"""Models on one environment, without a ranking inside the noise.

Of each model its newest completed evaluation stands. A place says how many others are surely above: those whose 95 %
interval lies wholly above one's own. Models whose intervals overlap share a place, whatever their means are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mettle.hub.results.pushed import COMPLETED, PushedResult


@dataclass(frozen=True, slots=True)
class Place:
    """One model. `last` is the lowest place that the intervals leave open to it."""

    first: int
    last: int
    result: PushedResult

    @property
    def shown(self) -> str:
        """As a list has it: 1, or 2-4 where it could be any of these."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def leaderboard(results: Sequence[PushedResult]) -> list[Place]:
    """The models, the highest mean first. An evaluation without an interval (of one task, or none) has no place."""
    newest: dict[str, PushedResult] = {}
    for result in sorted(results, key=lambda each: each.completed_at or 0.0):
        if result.status == COMPLETED and result.mean is not None and result.ci_low is not None:
            newest[result.model] = result
    ranked = sorted(newest.values(), key=lambda each: (-(each.mean or 0.0), each.model))
    places = []
    for one in ranked:
        above = sum((other.ci_low or 0.0) > (one.ci_high or 0.0) for other in ranked)
        below = sum((other.ci_high or 0.0) < (one.ci_low or 0.0) for other in ranked)
        places.append(Place(1 + above, len(ranked) - below, one))
    return places
