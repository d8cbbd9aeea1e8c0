"""Starting a worker, and what can be asked before it is at work: what the environment is, and its rows.

Parts: `WorkerSpec` (what to load), `Spawned` (a process that has loaded it), `WorkerProcess` and `WorkerHome` (a worker
and where it is started, on this machine or elsewhere), `ThisHost`, `WorkerDied`, `PlaceLost`. All of it blocks, for
code that has no event loop yet; a pool calls it in a thread. Invariant: a process that does not come up is ended and
reaped.
"""

from __future__ import annotations

import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mettle.errors import InfraError, UserError
from mettle.processes.child import ChildProcess, how_it_ended, import_path, python_module
from mettle.processes.frames import Frame, receive, send

ROWS_PER_FRAME = 1000
END_S = 5.0


class WorkerDied(InfraError):
    """The process that ran a group ended, or had to be ended."""


class PlaceLost(WorkerDied):
    """It was lost with the place that had started it, which says nothing of what it ran."""


@dataclass(frozen=True)
class WorkerSpec:
    """The environment of a worker: its id and arguments, and settings made after loading (see `set_kwargs`)."""

    env_id: str
    env_args: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.env_id:
            raise UserError("a worker loads its environment by id; this one was made in code and has none")


class WorkerProcess(Protocol):
    """A worker that was started and has not been greeted. Requests go over `connection`, its pulse comes on `pulse`."""

    connection: socket.socket
    pulse: socket.socket

    @property
    def pid(self) -> int: ...

    @property
    def where(self) -> str:
        """The place that it was started in, for a message; empty for this machine."""
        ...

    def kill(self) -> None:
        """End it; who reads from it learns that it has ended, also where it cannot be reached any more."""
        ...

    def end(self) -> None:
        """End it, reap it, and let go of the sockets."""
        ...

    def how_it_ended(self) -> str:
        """In words, for a message."""
        ...

    @property
    def is_place_lost(self) -> bool:
        """Whether it was lost with its place; known once `how_it_ended` has been asked."""
        ...


class WorkerHome(Protocol):
    """Where the workers of a pool are started."""

    def start(self) -> WorkerProcess:
        """A further worker. Raises: InfraError when none can be started; UserError when none ever will."""
        ...

    def close(self) -> None:
        """Whoever waits for room to start a worker gives up."""
        ...


class ThisHost:
    """Workers are children of this process."""

    def start(self) -> WorkerProcess:
        """A child."""
        return _Child()

    def close(self) -> None:
        """Nobody waits here."""


class _Child:
    where = ""
    is_place_lost = False

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        self.pulse, their_pulse = socket.socketpair()
        with theirs, their_pulse:
            self._process = start_worker(theirs, their_pulse)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)

    def end(self) -> None:
        self._process.kill()
        self.connection.close()
        self.pulse.close()

    def how_it_ended(self) -> str:
        code = self._process.wait(END_S)
        return "closed its connection" if code is None else how_it_ended(code)


def start_worker(
    connection: socket.socket, pulse: socket.socket, cwd: Path | None = None, place: str = ""
) -> ChildProcess:
    """The process that serves these two sockets, which the caller may close afterwards. `place` is told in its name."""
    ends = connection.fileno(), pulse.fileno()
    return ChildProcess(
        python_module("mettle.envs.workers.worker", *map(str, ends), *([place] if place else [])),
        tie="pipe",
        environment={"PYTHONPATH": import_path()},
        cwd=cwd,
        pass_fds=ends,
    )


class Spawned:
    """A worker process that has loaded its environment. `about` is what it says of it."""

    def __init__(self, spec: WorkerSpec, home: WorkerHome | None = None) -> None:
        self._env_id = spec.env_id
        self._process = (home or ThisHost()).start()
        self.connection, self.pulse = self._process.connection, self._process.pulse
        try:
            self.about = self._greet(spec)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def name(self) -> str:
        """Its id, and its place if that is not this machine."""
        return f"{self.pid} in {self._process.where}" if self._process.where else str(self.pid)

    def rows(self, split: str) -> list[dict[str, Any]]:
        """All rows of `train` or `eval`, ready for a rollout.

        Raises: UserError when the environment cannot give them, or they cannot be sent.
        """
        found: list[dict[str, Any]] = []
        while True:
            answer = self._ask("rows", split=split, start=len(found), stop=len(found) + ROWS_PER_FRAME)
            if "error" in answer:
                raise UserError(
                    f"the {split} rows of {self._env_id} cannot come from a worker process: {answer['error']}; "
                    "with `workers = 0` it runs in the process that wants them"
                )
            found += answer["rows"]
            if len(found) >= answer["num_rows"]:
                return found

    def set(self, settings: dict[str, Any]) -> None:
        """Change settings of the environment."""
        answer = self._ask("set", settings=settings)
        if "error" in answer:
            raise UserError(f"settings {settings} were refused: {answer['error']}")

    def _ask(self, op: str, **fields: Any) -> Frame:
        send(self.connection, {"op": op, "id": 0, **fields})
        answer = receive(self.connection)
        if answer is None:
            raise WorkerDied(f"worker {self.name} {self.how_it_ended()} when it was asked for `{op}`")
        return answer

    def kill(self) -> None:
        """End the process; who reads from it learns that it has."""
        self._process.kill()

    def end(self) -> None:
        """Kill and reap the process, and let go of the sockets."""
        self._process.end()

    def how_it_ended(self) -> str:
        """In words, for a message."""
        return self._process.how_it_ended()

    @property
    def is_place_lost(self) -> bool:
        """Whether it was lost with its place; known once `how_it_ended` has been asked."""
        return self._process.is_place_lost

    def _greet(self, spec: WorkerSpec) -> Frame:
        hello = {"env_id": spec.env_id, "env_args": spec.env_args, "settings": spec.settings, "paths": sys.path}
        self.connection.settimeout(spec.start_timeout_s)
        try:
            send(self.connection, hello)
            answer = receive(self.connection)
        except TimeoutError as error:
            raise WorkerDied(f"{spec.env_id} was not loaded within {spec.start_timeout_s:g} s") from error
        except ConnectionError:
            answer = None
        where = f" in {self._process.where}" if self._process.where else ""
        if answer is None:
            how = self.how_it_ended()
            kind = PlaceLost if self._process.is_place_lost else WorkerDied
            raise kind(f"the worker for {spec.env_id}{where} {how} while it loaded the environment")
        if "error" in answer:
            raise UserError(f"environment {spec.env_id!r} cannot be loaded{where}: {answer['error']}")
        self.connection.settimeout(None)
        return answer
