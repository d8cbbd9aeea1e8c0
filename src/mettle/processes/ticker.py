"""A thread that does one thing again and again until it is closed.

What is nothing but that is a `Ticker` itself; what has one beside other things holds it.
Invariant: a step that fails is told and made again at the next tick; nothing but `close` or `stop` ends the thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from mettle.errors import MettleError

logger = logging.getLogger(__name__)


class Ticker:
    """Does `step` every `tick_s` seconds, and `at_end` once, all in one thread; `name` is how the log calls it."""

    def __init__(
        self, name: str, step: Callable[[], object], *, tick_s: float, at_end: Callable[[], object] = lambda: None
    ) -> None:
        self._name, self._step, self._tick_s, self._at_end = name, step, tick_s, at_end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)

    def start(self) -> None:
        """Tick in a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """Make no further step, and wait for the end of the thread, where there is one."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def stop(self) -> None:
        """Let `run` return soon."""
        self._over.set()

    def run(self) -> None:
        """Tick in the thread that calls, until `stop`."""
        while not self._over.wait(self._tick_s):
            self.try_step()
        self._at_end()

    def try_step(self) -> None:
        """A step; one that could not be made is made later."""
        try:
            self._step()
        except (MettleError, OSError) as error:  # a full disk passes, and so does a cut network
            logger.warning("%s: waiting", self._name, extra={"error": str(error)})
        except Exception:
            logger.exception("%s: a step failed", self._name)
