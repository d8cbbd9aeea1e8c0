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

_QUIET_S: Final = 75.0  # clients of this package let go of an idle connection after 15 s
_MAX_QUIET: Final = 4096


class Connection(Protocol):
    """What is needed of one."""

    def force_close(self) -> None: ...


def _max_quiet() -> int:
    """Half of what this process may open at most: requests, uploads and machines need descriptors, too."""
    return min(_MAX_QUIET, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


@dataclass
class Visitors:
    """All connections of a service."""

    quiet_s: float = _QUIET_S
    max_quiet: int = field(default_factory=_max_quiet)
    clock: Callable[[], float] = time.monotonic
    connections: Callable[[], Sequence[Connection]] = list
    """Those that are open at the moment."""
    _busy: set[Connection] = field(default_factory=set)
    _quiet: dict[Connection, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def serving(self, connection: Connection) -> Iterator[None]:
        """While a request on it is answered; it has been quiet since then."""
        self._busy.add(connection)
        self._quiet.pop(connection, None)
        try:
            yield
        finally:
            self._busy.discard(connection)

    def sweep(self) -> None:
        """Hang up on those that have been quiet for too long, and on the oldest of too many."""
        now = self.clock()
        quiet = [one for one in self.connections() if one not in self._busy]
        self._quiet = {one: self._quiet.get(one, now) for one in quiet}
        oldest_first = sorted(quiet, key=lambda one: self._quiet[one])
        for place, one in enumerate(oldest_first):
            if now - self._quiet[one] > self.quiet_s or len(quiet) - place > self.max_quiet:
                del self._quiet[one]
                one.force_close()
