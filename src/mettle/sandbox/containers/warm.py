"""Containers made ahead of time.

Invariant: each is handed out once, and only while its agent can be reached; one that cannot be made is tried again
later, more and more seldom, and costs nobody but whoever then has to wait for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from mettle.errors import MettleError
from mettle.sandbox.containers.errors import SELDOM
from mettle.sandbox.containers.link import AgentLink
from mettle.web.backoff import Retries

logger = logging.getLogger(__name__)

_MAX_AGE_S: Final = 3600.0


class Keepable(Protocol):
    """What is needed of a container."""

    link: AgentLink

    async def remove(self) -> None: ...


C = TypeVar("C", bound=Keepable)


class _Kept(NamedTuple, Generic[C]):
    container: C
    made: float


class Warm(Generic[C]):
    """Keeps `target` of them."""

    def __init__(self, make: Callable[[], Awaitable[C]], target: int) -> None:
        self._make = make
        self._target = target
        self._kept: deque[_Kept[C]] = deque()
        self._is_wanted = asyncio.Event()
        self._filler: asyncio.Task[None] | None = None

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def start(self) -> None:
        if self._target and self._filler is None:
            self._is_wanted.set()
            self._filler = asyncio.create_task(self._fill(), name="warm containers")

    async def take(self) -> C | None:
        """One that is alive and not too old; None if there is none."""
        try:
            while self._kept:
                container, made = self._kept.popleft()
                if container.link.is_open and time.monotonic() - made < _MAX_AGE_S:
                    return container
                await container.remove()
            return None
        finally:
            self._is_wanted.set()

    async def close(self) -> None:
        """Remove them. Safe to call twice."""
        if self._filler is not None:
            self._filler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._filler
            self._filler = None
        while self._kept:
            await self._kept.popleft().container.remove()

    async def _fill(self) -> None:
        retries = Retries(SELDOM)
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            while len(self._kept) < self._target:
                try:
                    self._kept.append(_Kept(await self._make(), time.monotonic()))
                    retries = Retries(SELDOM)
                except MettleError as error:
                    logger.warning("no container could be made ahead of time: %s", error)
                    await retries.again()
