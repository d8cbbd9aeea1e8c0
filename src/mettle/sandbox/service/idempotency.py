"""A request with a key is carried out once, however often it is sent; whoever sends it again gets the same answer.

Invariant: work that nobody waits for any more is given a moment for its client to come back, and then ended; an answer
is kept for a while after it was given; a failure is not kept, because a new attempt may succeed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from mettle.errors import UserError

T = TypeVar("T")
_KEPT_S: Final = 30.0
_COME_BACK_S: Final = 5.0
_MAX_KEY: Final = 128


@dataclass
class _Answer:
    task: asyncio.Task[Any]
    fingerprint: str
    num_waiting: int = 0


class IdempotentRequests:
    """The work of the last minutes, by key."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}

    async def run(self, key: str | None, fingerprint: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the work, done now or before.

        `fingerprint` tells one request from another under the same key.
        """
        if not key:
            return await work()
        if len(key) > _MAX_KEY:
            raise UserError(f"an idempotency key has at most {_MAX_KEY} characters")
        known = self._answers.get(key)
        if known is None:
            known = self._answers[key] = _Answer(asyncio.create_task(work(), name="keyed request"), fingerprint)
            known.task.add_done_callback(lambda task: self._done(key, task))
        elif known.fingerprint != fingerprint:
            raise UserError("this idempotency key was used for another request")
        known.num_waiting += 1
        try:
            result: T = await asyncio.shield(known.task)
            return result
        finally:
            known.num_waiting -= 1
            if not known.num_waiting and not known.task.done():
                asyncio.get_running_loop().call_later(_COME_BACK_S, self._give_up, known)

    def forget(self, key: str) -> asyncio.Task[Any] | None:
        """The work of a key whose client does not want it any more; None when there is none."""
        known = self._answers.pop(key, None)
        return known.task if known is not None else None

    def close(self) -> None:
        for known in self._answers.values():
            known.task.cancel()

    def _give_up(self, work: _Answer) -> None:
        if not work.num_waiting and not work.task.done():
            work.task.cancel()

    def _done(self, key: str, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._answers.pop(key, None)
            return
        asyncio.get_running_loop().call_later(_KEPT_S, self._answers.pop, key, None)
