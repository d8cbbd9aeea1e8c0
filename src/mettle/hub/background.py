"""What a Hub does between requests, by one server of a folder at a time: submitted jobs, checks of releases, leases.

What it is made of is imported by its own thread: it is a third of all that a server imports, and no page waits for it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mettle.hub.lab import Lab

logger = logging.getLogger(__name__)
_AGAIN_S = 2.0
_AFTER_S = 1.0
"""From the start of a server on: whoever waits for its first page waits for that alone."""


class Part(Protocol):
    """One of the things that are done, in threads of its own."""

    def start(self) -> None: ...

    def close(self) -> None: ...


class BackgroundWork:
    """A thread for each, in whichever of a folder's servers holds its lock; another takes over when that one ends."""

    def __init__(
        self, lab: Lab, *, is_checking: bool = True, is_working: bool = True, more: Callable[[], list[Part]] = list
    ) -> None:
        """`more` makes what else is to be done; it is asked in the thread."""
        self._lab, self._is_checking, self._is_working, self._more = lab, is_checking, is_working, more
        self._over = threading.Event()
        self._parts: list[Part] = []
        self._thread = threading.Thread(target=self._hold, name="background", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take no more work; runs go on, checks begin again with the next server."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _hold(self) -> None:
        if self._over.wait(_AFTER_S):
            return
        handle = os.open(self._lab.folder / "work.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            while not self._is_ours(handle):
                if self._over.wait(_AGAIN_S):
                    return
            self._parts = self._made()
            for part in self._parts:
                part.start()
            self._over.wait()
            for part in self._parts:
                part.close()
        finally:
            os.close(handle)  # which lets go of the lock, as the end of the process does

    def _made(self) -> list[Part]:
        from mettle.hub.machines.keeper import LeaseKeeper

        made: list[Part] = [LeaseKeeper(self._lab)]
        if self._is_working:
            from mettle.hub.evaluating.local_queue import LocalQueue
            from mettle.hub.evaluating.worker import EvaluationWorker
            from mettle.hub.training.worker import QueueWorker

            made += [QueueWorker(self._lab), EvaluationWorker(LocalQueue(self._lab))]
        if self._is_checking:
            from mettle.hub.actions.checker import ReleaseChecker

            made.append(ReleaseChecker(self._lab))
        return [*made, *self._more()]

    @staticmethod
    def _is_ours(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
