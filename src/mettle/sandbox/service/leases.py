"""Clients that are still there: each is heard of with every request, and says so now and then when it has none.

Invariant: a client with a request open is there; one that has not been heard of for its lease has gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Key = tuple[str, str]


@dataclass
class _Lease:
    heard: float
    num_open: int = 0


@dataclass
class ClientLeases:
    """Who is there, by token and client."""

    lease_s: float
    clock: Callable[[], float] = time.monotonic
    _known: dict[Key, _Lease] = field(default_factory=dict)

    @contextlib.contextmanager
    def during_request(self, key: Key) -> Iterator[None]:
        """While a request of the client is answered."""
        lease = self._known.setdefault(key, _Lease(self.clock()))
        lease.num_open += 1
        try:
            yield
        finally:
            lease.num_open -= 1
            lease.heard = self.clock()

    def take_expired(self) -> list[Key]:
        """Those whose lease has run out since the last look; they are forgotten."""
        now = self.clock()
        gone = [key for key, one in self._known.items() if not one.num_open and now - one.heard > self.lease_s]
        for key in gone:
            del self._known[key]
        return gone
