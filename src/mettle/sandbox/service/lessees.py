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
class _Lessee:
    heard: float
    num_open: int = 0


@dataclass
class Lessees:
    """Who is there, by token and client."""

    lease_s: float
    clock: Callable[[], float] = time.monotonic
    _known: dict[Key, _Lessee] = field(default_factory=dict)

    @contextlib.contextmanager
    def hearing(self, key: Key) -> Iterator[None]:
        """While a request of the client is answered."""
        lessee = self._known.setdefault(key, _Lessee(self.clock()))
        lessee.num_open += 1
        try:
            yield
        finally:
            lessee.num_open -= 1
            lessee.heard = self.clock()

    def take_gone(self) -> list[Key]:
        """Those that have gone since the last look; they are forgotten."""
        now = self.clock()
        gone = [key for key, one in self._known.items() if not one.num_open and now - one.heard > self.lease_s]
        for key in gone:
            del self._known[key]
        return gone
