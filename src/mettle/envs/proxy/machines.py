"""An agent's machine, used from any event loop: the machines of environments live on a loop of their own.

Parts: `AgentMachine`, `AgentJob`. Invariant: what is done with a machine is done in the loop that it belongs to, and
cancelling it here cancels it there.
"""

from __future__ import annotations

import builtins
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mettle.envs.sandboxes.shared import SharedMachines, shared_machines
from mettle.errors import SandboxError

if TYPE_CHECKING:
    from mettle.sandbox import ExecResult
    from mettle.sandbox.machines.commands import Output
    from mettle.sandbox.machines.files import Entry, Snapshot
    from mettle.sandbox.protocols import Job, Machine


class AgentJob:
    """A command in the background."""

    def __init__(self, home: SharedMachines, job: Job) -> None:
        self._home = home
        self._job = job

    def poll(self) -> ExecResult | None:
        """The result, or None while it runs."""
        return self._job.poll()

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        """Wait for the result; None when it still runs after `timeout_s`."""
        return await self._home.run(self._job.wait(timeout_s))

    async def output(self) -> Output:
        """What it has written so far."""
        return await self._home.run(self._job.output())

    async def kill(self) -> ExecResult:
        """End it, and everything that it has started."""
        return await self._home.run(self._job.kill())


class AgentMachine:
    """What an environment does with a rollout's machine; see `mettle.sandbox.Machine` for each operation."""

    def __init__(self, home: SharedMachines, machine: Machine) -> None:
        self._home = home
        self._machine = machine
        self.id = machine.id

    @classmethod
    async def of(cls, sandbox_id: str) -> AgentMachine:
        """The machine of a sandbox that a client of this process has made."""
        home = shared_machines()

        async def look() -> Machine:
            if sandbox_id not in home.boxes:
                raise SandboxError(f"there is no sandbox {sandbox_id!r} (any more)")
            machine: Machine = home.boxes[sandbox_id].machine
            return machine

        return cls(home, await home.run(look()))

    @property
    def is_alive(self) -> bool:
        """False once it has ended, however that came."""
        return self._machine.is_alive

    @property
    def why_ended(self) -> str:
        """Why it has ended."""
        return self._machine.why_ended

    async def exec(self, command: str | Sequence[str], **options: Any) -> ExecResult:
        """Run a command and wait for it: `cwd`, `env`, `stdin`, `timeout_s` (30), `max_output_bytes`."""
        return await self._home.run(self._machine.exec(command, **options))

    async def start(self, command: str | Sequence[str], **options: Any) -> AgentJob:
        """Run a command in the background."""
        return AgentJob(self._home, await self._home.run(self._machine.start(command, **options)))

    async def upload(self, path: str, data: Any) -> None:
        """Write a file; a `Path` is a file or a folder of this host."""
        await self._home.run(self._machine.upload(path, data))

    async def upload_files(self, files: Mapping[str, Any]) -> None:
        """Write many files."""
        await self._home.run(self._machine.upload_files(files))

    async def download(self, path: str, *, max_bytes: int = 1 << 30) -> bytes:
        """A file's bytes. Raises: OSError."""
        return await self._home.run(self._machine.download(path, max_bytes=max_bytes))

    async def list(self, path: str = "/work") -> builtins.list[Entry]:
        """What a folder holds. Raises: OSError."""
        return await self._home.run(self._machine.list(path))

    async def snapshot(self, paths: Sequence[str] = ("/work",)) -> Snapshot:
        """The files below some paths."""
        return await self._home.run(self._machine.snapshot(paths))

    async def twin(self, snapshot: Snapshot, packages: Sequence[str] = ()) -> AgentMachine:
        """Another machine with the same limits, these files, and no process or variable of this one."""
        config = replace(self._machine.config, env={}, files={})

        async def make() -> Machine:
            machine = await self._home.create(config, tuple(packages))
            try:
                await machine.restore(snapshot)
            except BaseException:
                await machine.delete()
                raise
            return machine

        return AgentMachine(self._home, await self._home.run(make()))

    async def listen(self, port: int = 0) -> socket.socket:
        """A socket that listens inside the machine and belongs to the caller."""
        return await self._home.run(self._machine.listen(port))

    async def connect(self, port: int, *, timeout_s: float = 10.0) -> socket.socket:
        """A connection to a port inside. Raises: OSError."""
        return await self._home.run(self._machine.connect(port, timeout_s=timeout_s))

    async def delete(self) -> None:
        """End it. Doing it twice is harmless."""
        await self._home.run(self._machine.delete())
