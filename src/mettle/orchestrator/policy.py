"""The policy version that counts: the one that the engine has acknowledged.

Invariant: `version` never runs ahead of the engine. It is set after the engine has said that it serves
those weights and has reproduced their canary, so a group opened now cannot be sampled by older weights.
"""

from __future__ import annotations

from mettle.orchestrator.waits import Pulse, Waits
from mettle.records.versions import WeightVersion


class ServedPolicy:
    """What the engine serves. `is_serving` is False while it is gone or holds other weights than those acknowledged."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self.acknowledged: WeightVersion | None = None
        self.num_published = 0
        self.is_serving = False
        self.incarnation = ""

    @property
    def version(self) -> int:
        """The acknowledged version; -1 before the first."""
        return -1 if self.acknowledged is None else self.acknowledged.version

    def acknowledge(self, weights: WeightVersion, incarnation: str) -> None:
        """The engine serves `weights`."""
        self.acknowledged = weights
        self.incarnation = incarnation
        self.is_serving = True
        self._pulse.fire()

    def lose(self) -> None:
        """The engine is gone, or serves something else."""
        self.is_serving = False
        self._pulse.fire()

    def published(self, version: int) -> None:
        """The trainer has published up to `version`."""
        if version + 1 != self.num_published:
            self.num_published = version + 1
            self._pulse.fire()

    async def reach(self, version: int, waits: Waits, *, weights_s: float, inference_s: float) -> float:
        """Wait until `version` is published, then until it is acknowledged; returns the seconds it took."""
        waited = await waits.until(
            lambda: self.num_published > version or self.version >= version,
            edge="weights",
            awaits=f"trainer publishes v{version}",
            budget_s=weights_s,
        )
        return waited + await waits.until(
            lambda: self.version >= version,
            edge="inference",
            awaits=f"engine acknowledges v{version}",
            budget_s=inference_s,
        )
