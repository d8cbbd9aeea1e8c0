"""How long a machine may live: from its making, and since the end of its last order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.endings import EndCause, EndReason


class Timed:
    """A machine whose time may be over."""

    def __init__(self, config: MachineConfig) -> None:
        self.config = config
        self.created = time.monotonic()
        self._last_used = self.created
        self._num_busy = 0

    @property
    def is_busy(self) -> bool:
        """Whether an order is being carried out."""
        return self._num_busy > 0

    @property
    def idle_s(self) -> float:
        """Seconds since the end of the last order; 0 while one is carried out."""
        return 0.0 if self.is_busy else time.monotonic() - self._last_used

    def left_s(self) -> float | None:
        """Seconds until its time may be over; None if that never comes."""
        config = self.config
        ends = []
        if config.lifetime_s is not None:
            ends.append(self.created + config.lifetime_s - time.monotonic())
        if config.idle_s is not None:
            ends.append(config.idle_s - self.idle_s)
        return max(0.001, min(ends)) if ends else None

    def why_due(self) -> str:
        """Why its time is over; empty while it is not."""
        config = self.config
        if config.lifetime_s is not None and time.monotonic() - self.created >= config.lifetime_s:
            return EndReason(f"its lifetime of {config.lifetime_s:g} s is over", EndCause.LIFETIME)
        if config.idle_s is not None and self.idle_s >= config.idle_s:
            return EndReason(f"nothing was asked of it for {config.idle_s:g} s", EndCause.IDLE)
        return ""

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """While an order is carried out, the machine is not idle."""
        self._num_busy += 1
        try:
            yield
        finally:
            self._num_busy -= 1
            self._last_used = time.monotonic()
