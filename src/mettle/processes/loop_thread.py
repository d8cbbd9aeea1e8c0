"""An event loop in a thread of its own, for what code without one waits for.

Invariant: what still runs when it is closed is cancelled and waited for, so that nothing ends half-way unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs until `close`, or until the process ends."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether work is taken. In a fork of the process it is not."""
        return self._thread.is_alive()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` on the loop; from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, timeout_s: float | None = None) -> bool:
        """Cancel what runs and end the thread; whether it ended in time. Safe to call twice."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it is closed, and its thread about to end
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            if left := asyncio.all_tasks(self._loop):
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
