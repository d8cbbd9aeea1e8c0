"""Connections on which nothing is asked: hung up on after a while, whether they have shown a token or not.

Anybody who reaches the port can open them, and each takes a descriptor of the service. Invariant: a connection with a
request on it stays; of the others those that are too old go, and the oldest when there are too many.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

_IDLE_S: Final = 75.0  # clients of this package let go of an idle connection after 15 s
_MAX_IDLE: Final = 4096


class Closable(Protocol):
    """What is needed of one."""

    def force_close(self) -> None: ...


def _max_idle() -> int:
    """Half of what this process may open at most: requests, uploads and machines need descriptors, too."""
    return min(_MAX_IDLE, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


@dataclass
class IdleConnections:
    """All connections of a service."""

    idle_s: float = _IDLE_S
    max_idle: int = field(default_factory=_max_idle)
    clock: Callable[[], float] = time.monotonic
    connections: Callable[[], Sequence[Closable]] = list
    """Those that are open at the moment."""
    _busy: set[Closable] = field(default_factory=set)
    _idle: dict[Closable, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def serving(self, connection: Closable) -> Iterator[None]:
        """While a request on it is answered; it has been idle since then."""
        self._busy.add(connection)
        self._idle.pop(connection, None)
        try:
            yield
        finally:
            self._busy.discard(connection)

    def sweep(self) -> None:
        """Hang up on those that have been idle for too long, and on the oldest of too many."""
        now = self.clock()
        idle = [one for one in self.connections() if one not in self._busy]
        self._idle = {one: self._idle.get(one, now) for one in idle}
        oldest_first = sorted(idle, key=lambda one: self._idle[one])
        for place, one in enumerate(oldest_first):
            if now - self._idle[one] > self.idle_s or len(idle) - place > self.max_idle:
                del self._idle[one]
                one.force_close()
