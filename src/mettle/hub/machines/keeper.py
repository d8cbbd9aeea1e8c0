"""The thread that takes work back from machines of which nothing is heard."""

from __future__ import annotations

import logging

from mettle.hub.lab import Lab
from mettle.hub.machines import leases
from mettle.processes.ticker import Ticker

logger = logging.getLogger(__name__)
TICK_S = 1.0


class LeaseKeeper(Ticker):
    """Looks at the leases until it is closed. When it begins, all of them have their whole time again."""

    def __init__(self, lab: Lab, *, tick_s: float = TICK_S) -> None:
        self._lab = lab
        super().__init__("leases", self.step, tick_s=tick_s)

    def start(self) -> None:
        with self._lab.database.write() as c:
            leases.renew_all(c, self._lab)
        super().start()

    def step(self) -> None:
        """Take back what is overdue."""
        if num := leases.expire(self._lab):
            logger.warning("took work back from machines that are silent", extra={"num": num})
