"""A worker: the process that holds an environment and runs groups of rollouts on demand.

`python -m mettle.envs.workers.worker FD PULSE_FD [PLACE]`, started by `spawn`, or by a `place` on another machine. The
first frame says which environment to load; then requests come (`group`, `rows`, `set`, `cancel`, `stop`) and answers go
back under the request's `id`. A thread of its own sends a pulse: how long the event loop has been late, what it holds
in memory.
Invariants: requests run side by side and one that fails answers with its error; the pulse does not depend on the event
loop, so that a blocked loop is told from a dead process; when the other end is gone, so is this process, at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mettle.envs.packages.loading import load_environment
from mettle.envs.workers.endpoints import ClientCache
from mettle.envs.workers.states import wired_state
from mettle.errors import MettleError
from mettle.processes.beats import Gauge, Heartbeat
from mettle.processes.collector import quiet_collector
from mettle.processes.frames import Frame, encode, read_frame, receive, send
from mettle.processes.liveness import worker_name
from mettle.processes.orphans import end_with_parent

logger = logging.getLogger(__name__)

PULSE_S = 0.5
TICK_S = 0.02


class WorkerPulse(threading.Thread):
    """Says twice a second that the process lives, and how late its event loop has been since the last time."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(daemon=True, name="pulse")
        self._connection = connection
        self._due: float | None = None
        self._worst_s = 0.0
        self.num_running = 0

    def run(self) -> None:
        """Beat until the other end is gone, then end the process."""
        while True:
            worst, self._worst_s = max(self._worst_s, self._late_s()), 0.0
            usage = resource.getrusage(resource.RUSAGE_SELF)
            beat = {"lag_s": worst, "num_running": self.num_running, "max_rss_kib": usage.ru_maxrss}
            try:
                self._connection.sendall(json.dumps(beat).encode() + b"\n")
            except OSError:
                os._exit(0)
            time.sleep(PULSE_S)

    def tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note how late the event loop is, again and again."""
        self._worst_s = max(self._worst_s, self._late_s())
        self._due = time.monotonic() + TICK_S
        loop.call_later(TICK_S, self.tick, loop)

    def _late_s(self) -> float:
        return 0.0 if self._due is None else max(0.0, time.monotonic() - self._due)


class Server:
    """Answers the requests of one connection."""

    def __init__(self, env: Any, writer: asyncio.StreamWriter, pulse: WorkerPulse, heart: Heartbeat) -> None:
        self._env = env
        self._heart = heart
        self._writer = writer
        self._pulse = pulse
        self._clients = ClientCache()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._num_done = 0
        heart.gauge = lambda: Gauge(self._num_done, pulse.num_running > 0)

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Take requests until told to stop."""
        self._pulse.tick(asyncio.get_running_loop())
        self._heart.tick_with(asyncio.get_running_loop())
        while (request := await read_frame(reader)) is not None and request["op"] != "stop":
            if request["op"] == "cancel":
                if (task := self._running.get(request["id"])) is not None:
                    task.cancel()
                continue
            number = request["id"]
            self._running[number] = asyncio.get_running_loop().create_task(self._answer(number, request))
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._clients.close()
        await self._env.teardown()

    async def _answer(self, number: int, request: Frame) -> None:
        self._pulse.num_running += 1
        try:
            arrays: list[Any] = []
            answer = await getattr(self, f"_do_{request['op']}")(request, arrays)
            frame = encode({"id": number, **answer}, arrays)
        except Exception as error:
            logger.warning("request failed", exc_info=error)
            frame = encode({"id": number, "error": f"{type(error).__name__}: {error}"})
        finally:
            self._pulse.num_running -= 1
            self._num_done += 1
            self._running.pop(number, None)
        self._writer.write(frame)
        with suppress(ConnectionError):
            await self._writer.drain()

    async def _do_group(self, request: Frame, arrays: list[Any]) -> Frame:
        client = self._clients.client(request["client"])
        rows, options = request["rows"], {"max_retries": request["max_retries"]}
        if request["is_independent"]:
            arguments = (client, request["model"], request["sampling_args"])
            states = [await self._env.run_rollout(row, *arguments, **options) for row in rows]
        else:
            states = await self._env.run_group(rows, client, request["model"], request["sampling_args"], **options)
        return {"states": [wired_state(state, arrays, request["columns"]) for state in states]}

    async def _do_rows(self, request: Frame, _: list[Any]) -> Frame:
        rows = self._env.get_dataset() if request["split"] == "train" else self._env.get_eval_dataset()
        wanted = range(request["start"], min(request["stop"], len(rows)))
        return {"rows": [rows[index] for index in wanted], "num_rows": len(rows)}

    async def _do_set(self, request: Frame, _: list[Any]) -> Frame:
        self._env.set_kwargs(**request["settings"])
        return {}


def described(env: Any) -> Frame:
    """What the other side has to know of an environment."""
    return {
        "pid": os.getpid(),
        "sampling_args": env.sampling_args,
        "pass_threshold": env.pass_threshold,
        "pass_on": env.pass_on,
        "tool_defs": [dict(tool) for tool in env.tool_defs],
        "requires_group_rollouts": env.requires_group_rollouts,
        "provides_advantages": env.provides_advantages,
        "env_version": getattr(env, "env_version", None),
        "timeout_seconds": getattr(env, "timeout_seconds", 0),
    }


def load(hello: Mapping[str, Any]) -> tuple[Any, Frame]:
    """The environment that the first frame asks for, and the answer to it."""
    for path in hello["paths"]:
        if path not in sys.path:
            sys.path.append(path)
    try:
        env = load_environment(hello["env_id"], **hello["env_args"])
        env.set_kwargs(**hello["settings"])
        return env, described(env)
    except (MettleError, RuntimeError, ValueError) as error:
        return None, {"error": str(error), "is_users": not isinstance(error, RuntimeError)}


async def serve(env: Any, connection: socket.socket, pulse: WorkerPulse, heart: Heartbeat) -> None:
    """Serve one connection."""
    reader, writer = await asyncio.open_connection(sock=connection)
    await Server(env, writer, pulse, heart).serve(reader)
    writer.close()


def main() -> None:
    """Load, say so, serve."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one, which ends it
    connection, beats = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    place = "".join(sys.argv[3:4])
    pulse = WorkerPulse(beats)
    pulse.start()
    hello = receive(connection)
    if hello is None:
        return
    with Heartbeat.of_run(worker_name(hello["env_id"], os.getpid(), place), unit="rollouts") as heart:
        heart.gauge = lambda: Gauge(0, has_work=True)  # loading is work, too, and may hang
        env, answer = load(hello)
        send(connection, answer)
        if env is not None:
            with quiet_collector():
                asyncio.run(serve(env, connection, pulse, heart))


if __name__ == "__main__":
    main()
