"""Workers on other machines: which place starts the next one, and a worker as the pool that asked for it sees it.

Parts: `WorkerPlaces` (all places of a run, for all of its pools), `PlacedHome` (where one pool's workers are started),
`PlacedWorker`. A place says in its ready file where it listens; whoever keeps it alive removes that when it is gone.
Invariants: a pool's workers are spread evenly, and only where a place stays away is another one given more than its
share; who waits for a place waits until there is one or the pool is closed, because how long a run may do without is
for its supervisor to say.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mettle.envs.workers.handshake import enter, keep_alive
from mettle.envs.workers.place import FRAMES, GREET_S, PULSE
from mettle.envs.workers.spawn import END_S, WorkerDied, WorkerProcess
from mettle.errors import MettleError, UserError
from mettle.processes.child import how_it_ended
from mettle.processes.frames import Frame, receive, send
from mettle.processes.ready_file import ReadyFile

logger = logging.getLogger(__name__)

SEEK_S = 0.3
SPREAD_S = 30.0
"""A place that is away for longer leaves its share of the workers to the others."""


class WorkerPlaces:
    """The places with these ready files, whose stems are their names."""

    def __init__(self, ready_files: Sequence[Path], key: str, *, spread_s: float = SPREAD_S) -> None:
        self.names = {path.stem: ReadyFile(path) for path in ready_files}
        self.key = key
        self.spread_s = spread_s
        self.lock = threading.Lock()
        self.load = Counter[str]()
        """Workers of all pools, by place."""

    def home(self, num_workers: int) -> PlacedHome:
        """Where a pool of so many workers has them started."""
        return PlacedHome(self, num_workers)


class PlacedHome:
    """Starts the workers of one pool in `places`."""

    def __init__(self, places: WorkerPlaces, num_workers: int) -> None:
        self._places = places
        self._share = -(-num_workers // len(places.names))
        self._own = Counter[str]()
        self._is_closed = threading.Event()

    def start(self) -> WorkerProcess:
        """A worker in the place that has the fewest; waits for one. Raises: WorkerDied when the pool is closed."""
        began = time.monotonic()
        while not self._is_closed.is_set():
            tried: set[str] = set()
            while (name := self._take(tried, is_late=time.monotonic() - began > self._places.spread_s)) is not None:
                try:
                    return self._start_in(name)
                except (OSError, KeyError, MettleError) as error:
                    self.give_back(name)
                    if isinstance(error, UserError):
                        raise
                    logger.warning("place %s did not start a worker: %s", name, error)
                    tried.add(name)
            self._is_closed.wait(SEEK_S)
        raise WorkerDied("the pool was closed before there was a place for a worker")

    def close(self) -> None:
        """Nobody waits for a place any more."""
        self._is_closed.set()

    def give_back(self, name: str) -> None:
        """A worker there has ended."""
        with self._places.lock:
            self._places.load[name] -= 1
            self._own[name] -= 1

    def _take(self, tried: set[str], *, is_late: bool) -> str | None:
        """The place with the fewest workers of this pool, then of all, that says where it is; it has one more now."""
        with self._places.lock:
            free = [
                name
                for name, ready in self._places.names.items()
                if name not in tried and (is_late or self._own[name] < self._share) and ready.endpoint() is not None
            ]
            name = min(free, key=lambda one: (self._own[one], self._places.load[one]), default=None)
            if name is not None:
                self._places.load[name] += 1
                self._own[name] += 1
            return name

    def _start_in(self, name: str) -> PlacedWorker:
        """Raises: OSError, WorkerDied or KeyError when the place does not do it; UserError when it never will."""
        told = self._places.names[name].endpoint()
        if told is None:
            raise WorkerDied("it is gone")
        opened: list[socket.socket] = []
        try:
            control = self._connect(told, opened)
            send(control, {"do": "start", "cwd": os.getcwd()})
            answer = _answer(control)
            if answer["byteorder"] != sys.byteorder:
                raise UserError(
                    f"the node of {name} writes numbers in another order of bytes ({answer['byteorder']}-endian): place"
                    " workers on machines of one kind"
                )
            for part in (FRAMES, PULSE):
                send(self._connect(told, opened), {"do": "join", "ticket": answer["ticket"], "part": part})
            pid = int(_answer(control)["pid"])
        except BaseException:
            for connection in opened:
                connection.close()
            raise
        for connection in opened:
            connection.settimeout(None)
        return PlacedWorker(self, name, pid, *opened)

    def _connect(self, told: Frame, opened: list[socket.socket]) -> socket.socket:
        connection = socket.create_connection((told["host"], told["port"]), timeout=GREET_S)
        opened.append(connection)
        keep_alive(connection)
        enter(connection, self._places.key, GREET_S)
        return connection


class PlacedWorker:
    """A worker in a place. On `control` the place says how it ended; when that is closed, it ends."""

    def __init__(
        self,
        home: PlacedHome,
        where: str,
        pid: int,
        control: socket.socket,
        connection: socket.socket,
        pulse: socket.socket,
    ) -> None:
        self._home = home
        self.where = where
        self.pid = pid
        self._control = control
        self.connection = connection
        self.pulse = pulse
        self._is_over = False
        self.is_place_lost = False

    def kill(self) -> None:
        """End it. Its connection is cut here, too: it may be where nothing is heard from any more."""
        for line in (self._control, self.connection):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """End it, and let go of it."""
        if self._is_over:
            return
        self._is_over = True
        self.kill()
        for line in (self._control, self.connection, self.pulse):
            line.close()
        self._home.give_back(self.where)

    def how_it_ended(self) -> str:
        """As its place says; the place may be gone with it."""
        try:
            self._control.settimeout(END_S)
            told = receive(self._control)
        except TimeoutError:
            return "closed its connection"
        except OSError:
            told = None
        self.is_place_lost = told is None
        return "is gone with its place" if told is None else how_it_ended(int(told["code"]))


def _answer(control: socket.socket) -> Frame:
    told = receive(control)
    if told is None:
        raise WorkerDied("it hung up")
    return told
