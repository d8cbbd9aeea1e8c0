"""Who has yet to prove at a place that they belong to the run.

Parts: `Entrance` (takes connections and hands on those whose other end has the key). Invariants: one thread serves all
who have not proved it, whatever they send or leave out; there are at most `max_waiting` of them; each has `prove_s` in
all, and `full_s` while there is no room for another.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import cast

from mettle.envs.workers.handshake import KeyProof, NotKnown, keep_alive

logger = logging.getLogger(__name__)

PROVE_S = 10.0
FULL_S = 1.0
MAX_WAITING = 256
PAUSE_S = 0.2


class Entrance:
    """Lets in at `listener`, which it closes in the end, those who have `key`."""

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        *,
        max_waiting: int = MAX_WAITING,
        prove_s: float = PROVE_S,
        full_s: float = FULL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._key = key
        self._max_waiting, self._prove_s, self._full_s = max_waiting, prove_s, full_s
        self._clock = clock
        self._waiting: dict[socket.socket, tuple[KeyProof, float]] = {}
        """What each has proved so far, and since when it is here; the oldest first."""
        self._selector = selectors.DefaultSelector()
        self._end, self._other_end = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._end, selectors.EVENT_READ)

    def let_in(self) -> Iterator[socket.socket]:
        """Connections whose other end has the key, as they come, until this is closed."""
        try:
            while True:
                for ready, _ in self._selector.select(self._left_s()):
                    connection = cast(socket.socket, ready.fileobj)
                    if connection is self._end:
                        return
                    if connection is self._listener:
                        self._take()
                    elif self._has_proved(connection):
                        yield connection
                self._end_late()
        finally:
            for connection in list(self._waiting):
                self._forget(connection).close()
            self._selector.close()
            self._listener.close()
            self._end.close()

    def close(self) -> None:
        """Let nobody in any more, and end those who have yet to prove it."""
        self._other_end.close()

    @property
    def _patience_s(self) -> float:
        return self._prove_s if len(self._waiting) < self._max_waiting else self._full_s

    def _left_s(self) -> float | None:
        """How long the oldest has left; None when nobody waits."""
        for _, since in self._waiting.values():
            return max(0.0, since + self._patience_s - self._clock())
        return None

    def _take(self) -> None:
        since = self._clock()
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # who came is gone
            return
        except OSError as error:
            logger.warning("no connection can be taken: %s", error)
            time.sleep(PAUSE_S)  # of descriptors there may be some again when a worker has ended
            return
        try:
            keep_alive(connection)
            self._waiting[connection] = KeyProof(connection, self._key), since
        except OSError as error:
            logger.info("a connection ended: %r", error)
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._waiting) >= self._max_waiting:
            self._selector.unregister(self._listener)

    def _has_proved(self, connection: socket.socket) -> bool:
        """Whether its other end has now proved that it has the key; then the connection is no longer ours."""
        try:
            if not self._waiting[connection][0].hear():
                return False
        except NotKnown as error:
            logger.warning("%s", error)
        except OSError as error:
            logger.info("a connection ended: %r", error)
        else:
            self._forget(connection)
            return True
        self._forget(connection).close()
        return False

    def _end_late(self) -> None:
        while self._left_s() == 0.0:
            logger.warning("a connection was ended that did not prove in time to be of this run")
            self._forget(next(iter(self._waiting))).close()

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        if len(self._waiting) >= self._max_waiting:
            self._selector.register(self._listener, selectors.EVENT_READ)
        del self._waiting[connection]
        return connection
