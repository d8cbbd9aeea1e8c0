"""Starting a worker, and what can be asked before it is at work: what the environment is, and its rows.

Parts: `WorkerSpec` (what to load), `Spawned` (a process that has loaded it), `WorkerDied`. All of it blocks, for code
that has no event loop yet; a pool calls it in a thread. Invariant: a process that does not come up is ended and reaped.
"""

from __future__ import annotations

import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

from mettle.errors import InfraError, UserError
from mettle.processes.child import ChildProcess, how_it_ended, import_path, python_module
from mettle.processes.frames import Frame, receive, send

ROWS_PER_FRAME = 1000
END_S = 5.0


class WorkerDied(InfraError):
    """The process that ran a group ended, or had to be ended."""


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


class Spawned:
    """A worker process that has loaded its environment. `about` is what it says of it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._env_id = spec.env_id
        self.connection, theirs = socket.socketpair()
        self.pulse, their_pulse = socket.socketpair()
        with theirs, their_pulse:
            ends = theirs.fileno(), their_pulse.fileno()
            self._child = ChildProcess(
                python_module("mettle.envs.workers.worker", *map(str, ends)),
                tie="pipe",
                environment={"PYTHONPATH": import_path()},
                pass_fds=ends,
            )
        try:
            self.about = self._greet(spec)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

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
            raise WorkerDied(f"worker {self.pid} {self.how_it_ended()} when it was asked for `{op}`")
        return answer

    def kill(self) -> None:
        """End the process; who reads from it learns that it has."""
        self._child.signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill and reap the process, and let go of the sockets."""
        self._child.kill()
        self.connection.close()
        self.pulse.close()

    def how_it_ended(self) -> str:
        """In words, for a message."""
        code = self._child.wait(END_S)
        return "closed its connection" if code is None else how_it_ended(code)

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
        if answer is None:
            raise WorkerDied(f"the worker for {spec.env_id} {self.how_it_ended()} while it loaded the environment")
        if "error" in answer:
            raise UserError(f"environment {spec.env_id!r} cannot be loaded: {answer['error']}")
        self.connection.settimeout(None)
        return answer
