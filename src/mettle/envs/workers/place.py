"""A place for workers on another machine: starts them for the pools of a run, and says how each has ended.

`python -m mettle.envs.workers.place NAME --host ADDRESS --ready-file FILE`, with the key of the run's workers in its
environment. A pool opens three connections for each worker: one on which the worker is asked for and its end is told,
and two that are handed to the worker itself, for requests and for its pulse (see `worker`), so that nothing passes
through this process. Invariants: a worker ends with the connection that asked for it, and with this process; who cannot
prove to have the key has nothing started, and no thread (see `entrance`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mettle.envs.workers.entrance import Entrance
from mettle.envs.workers.spawn import start_worker
from mettle.errors import MettleError, UserError
from mettle.processes.beats import Gauge, Heartbeat
from mettle.processes.child import ChildProcess
from mettle.processes.frames import Frame, receive, send
from mettle.processes.readiness import is_readable
from mettle.storage.files import write_json
from mettle.web.keys import WORKERS_KEY_ENV

logger = logging.getLogger(__name__)

GREET_S = 10.0
LOOK_S = 0.2
FRAMES, PULSE = "frames", "pulse"


class WorkerPlace:
    """Starts workers for whoever has `key`. They beat as of the place `name`. The listener is its own."""

    def __init__(self, listener: socket.socket, key: str, name: str) -> None:
        self._entrance = Entrance(listener, key)
        self._name = name
        self._running: set[ChildProcess] = set()
        self._joining: dict[str, queue.Queue[tuple[str, socket.socket]]] = {}
        """By ticket: where the connections of a worker that is about to be started come in."""

    def serve(self) -> None:
        """Take connections until it is to drain; each that belongs to the run has a thread of its own."""
        for connection in self._entrance.let_in():
            threading.Thread(target=self._meet, args=(connection,), daemon=True, name="connection").start()

    def _meet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(GREET_S)
            word = receive(connection)
            if word is not None and word["do"] == "join":
                self._joining[word["ticket"]].put((word["part"], connection))
                return  # it is the worker's now
            if word is not None:
                self._start(connection, word)
        except (OSError, MettleError, KeyError) as error:
            logger.info("a connection ended: %r", error)
        connection.close()

    def _start(self, control: socket.socket, word: Frame) -> None:
        ticket, coming = secrets.token_hex(16), queue.Queue[tuple[str, socket.socket]]()
        self._joining[ticket] = coming
        parts: dict[str, socket.socket] = {}
        try:
            send(control, {"ticket": ticket, "byteorder": sys.byteorder})
            with contextlib.suppress(queue.Empty):
                while len(parts) < 2:
                    part, connection = coming.get(timeout=GREET_S)
                    connection.settimeout(None)  # what the worker gets is the same socket, and it waits without end
                    parts[part] = connection
            if len(parts) < 2:
                return
            child = start_worker(parts[FRAMES], parts[PULSE], _folder(word["cwd"]), self._name)
        finally:
            del self._joining[ticket]
            for connection in parts.values():
                connection.close()
        self._watch(control, child)

    def _watch(self, control: socket.socket, child: ChildProcess) -> None:
        """Until the worker ends, or whoever asked for it hangs up, which ends it."""
        self._running.add(child)
        try:
            send(control, {"pid": child.pid})
            while child.exit_code() is None and not is_readable(control, LOOK_S):
                pass
            if (code := child.exit_code()) is not None:
                send(control, {"code": code})
        finally:
            child.kill()
            self._running.discard(child)

    def drain(self) -> None:
        """Take nothing new, and let the pools end what runs, which tears their environments down."""
        self._entrance.close()
        while self._running:
            time.sleep(LOOK_S)


def _folder(path: str) -> Path | None:
    """Where the owner was started, if this machine has such a folder: paths in an environment's arguments mean that."""
    return Path(path) if Path(path).is_dir() else None


def main(given: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, and then as long as there are workers."""
    parser = argparse.ArgumentParser(prog="python -m mettle.envs.workers.place")
    parser.add_argument("name")
    parser.add_argument("--host", required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    arguments = parser.parse_args(given)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    key = os.environ.pop(WORKERS_KEY_ENV, "")  # what runs in a worker has no use for it
    if not key:
        sys.stderr.write(f"error: a place for workers wants the run's key in {WORKERS_KEY_ENV}\n")
        return UserError.exit_code
    with (
        socket.create_server((arguments.host, 0)) as listener,
        Heartbeat.of_run(arguments.name, unit="workers") as heart,
    ):
        heart.gauge = lambda: Gauge(0, has_work=False)
        host, port = listener.getsockname()[:2]
        write_json(arguments.ready_file, {"host": host, "port": port, "pid": os.getpid()})
        place, is_told = WorkerPlace(listener, key, arguments.name), threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: is_told.set())
        threading.Thread(target=place.serve, daemon=True, name="listener").start()
        is_told.wait()
        place.drain()
    return 0


if __name__ == "__main__":
    sys.exit(main())
