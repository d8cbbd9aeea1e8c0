"""The supervisor's words to the journal, written by a thread of its own.

A process that is frozen in the middle of a transaction locks the ledger for everybody; whoever has to end it must not
wait for that. Invariants: what is put first is written first; the first failure is kept, and ends the run. What could
not be written, and all that is put after it, is held until `again`: on a full disk that is when there is room.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from mettle.errors import StorageError

logger = logging.getLogger(__name__)


class JournalThread:
    """Writes what it is given, in order. `on_idle` is called every second, also while the supervisor's loop stands."""

    def __init__(self, on_idle: Callable[[], None] = lambda: None) -> None:
        self.error: StorageError | None = None
        self._on_idle = on_idle
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._held: list[Callable[[], None]] = []

    def put(self, write: Callable[[], None]) -> None:
        """Have it written soon."""
        self._queue.put(write)

    def start(self) -> None:
        """Begin to write."""
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def again(self) -> None:
        """Have what is held written: there may be room now."""
        self._queue.put(self._write_held)

    def close(self, timeout_s: float) -> None:
        """Write what is left, for as long as `timeout_s`."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                write = self._queue.get(timeout=1.0)
            except queue.Empty:
                self._try(self._on_idle)
                continue
            if write is None:
                return
            if write == self._write_held:
                write()
            else:
                self._do(write)

    def _do(self, write: Callable[[], None]) -> None:
        if self._held or not self._try(write):
            self._held.append(write)

    def _write_held(self) -> None:
        held, self._held = self._held, []
        for write in held:
            self._do(write)

    def _try(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except StorageError as error:
            logger.error("%s", error)
            self.error = self.error or error
            return False
        return True
