"""How many groups may be open, from what the engine says of its memory. A pure state machine: no I/O, no clock.

    more open than the engine can hold ──► it preempts ──► down to `BACK_OFF` of what is open, then HOLD looks of calm
    bytes for another group are free, nobody waits, and the limit is what holds us back ──► one more

So the limit falls once for a burst of preemptions, however many looks tell of it, never leaves [lowest, highest], and
comes back when there is room. Where an engine tells nothing of its memory (vLLM, another server) the limit stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BACK_OFF = 0.75
HOLD = 5
"""Looks after a step back in which the limit stays: what was open before has to end first."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine says of itself. `num_running` and `num_waiting` count sequences, `num_preempted` since its start.

    `kv_bytes` of `kv_budget_bytes` are taken; a budget of 0 is one that is not told.
    """

    num_running: int
    num_waiting: int
    kv_bytes: int
    kv_budget_bytes: int
    num_preempted: int = 0

    @property
    def free_bytes(self) -> int:
        """What keys and values may still take."""
        return max(0, self.kv_budget_bytes - self.kv_bytes)


class Concurrency:
    """The limit of open groups between `lowest` and `highest`; it begins at `highest`."""

    def __init__(self, lowest: int, highest: int, group_size: int) -> None:
        assert 1 <= lowest <= highest, f"{lowest} to {highest} groups"
        self.lowest = lowest
        self.highest = highest
        self.limit = highest
        self._group_size = group_size
        self._num_preempted: int | None = None
        self._hold = 0

    def observe(self, load: EngineLoad, num_open: int) -> int:
        """Take a look at the engine into account; returns the limit from now on."""
        before, self._num_preempted = self._num_preempted, load.num_preempted
        if load.kv_budget_bytes <= 0:
            return self.limit
        if before is not None and load.num_preempted > before and not self._hold:
            self.limit = max(self.lowest, min(self.limit, math.floor(BACK_OFF * max(1, num_open))))
            self._hold = HOLD
        elif self._hold:
            self._hold -= 1
        elif num_open >= self.limit and not load.num_waiting and self._has_room(load):
            self.limit = min(self.highest, self.limit + 1)
        return self.limit

    def _has_room(self, load: EngineLoad) -> bool:
        """True when a group of sequences as large as those that run would fit."""
        if not load.num_running:
            return True
        return load.free_bytes * load.num_running >= self._group_size * load.kv_bytes
