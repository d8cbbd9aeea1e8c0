"""The thread that takes work back from machines of which nothing is heard."""

from __future__ import annotations

import logging
import threading

from mettle.errors import MettleError
from mettle.hub.lab import Lab
from mettle.hub.machines import leases

logger = logging.getLogger(__name__)
TICK_S = 1.0


class LeaseKeeper:
    """Looks at the leases until it is closed. When it begins, all of them have their whole time again."""

    def __init__(self, lab: Lab, *, tick_s: float = TICK_S) -> None:
        self._lab, self._tick_s = lab, tick_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="leases", daemon=True)

    def start(self) -> None:
        with self._lab.database.write() as c:
            leases.renew_all(c, self._lab)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def step(self) -> None:
        """Take back what is overdue."""
        if num := leases.expire(self._lab):
            logger.warning("took work back from machines that are silent", extra={"num": num})

    def _work(self) -> None:
        while not self._over.wait(self._tick_s):
            try:
                self.step()
            except MettleError as error:
                logger.warning("leases wait", extra={"error": str(error)})
            except Exception:
                logger.exception("the keeper of leases failed")
