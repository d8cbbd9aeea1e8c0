"""What every backend offers: a judge, machines, and the handles of what runs in them.

`Backend` is what an entry point of the group `mettle.sandboxes` names; `Judge` and `Machines` are the pools that it
makes, each used as `async with`. `Machine`, `Job` and `Stream` are handles. `mettle.sandbox.testing` has the contract
that all of them keep, as test classes to subclass.

Invariant: whatever the code inside does is a result; `UserError` is the caller's mistake, `OSError` what is in the way
of a file or port inside, and `SandboxError` (`MachineLost`: this machine) says that the sandbox itself failed.
"""

from __future__ import annotations

import builtins
import socket
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.judge.request import CodeJudge
from mettle.sandbox.machines.commands import CommandRunner, Job, Stream
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.files import Content, Entry, Snapshot

__all__ = ["Backend", "Job", "Judge", "Machine", "Machines", "Stream"]


@runtime_checkable
class Machine(CommandRunner, Protocol):
    """A machine to work in. After `delete`, or after the end of its owner, nothing of it is left."""

    id: str
    config: MachineConfig
    isolation: IsolationReport
    why_ended: str
    """Empty while it lives, as far as is known here."""

    @property
    def is_alive(self) -> bool:
        """Whether an order can still be given, as far as is known here."""
        ...

    async def upload(self, path: str, data: Content) -> None:
        """Write a file; a `Path` is a file or a directory of the host. Directories on the way are made."""
        ...

    async def upload_files(self, files: Mapping[str, Content]) -> None:
        """Write many files at once. Raises: OSError for what is in the way inside the machine."""
        ...

    async def download(self, path: str, *, max_bytes: int = 1 << 30) -> bytes:
        """The bytes of a file. Raises: OSError as `open` would, and EFBIG over `max_bytes`."""
        ...

    async def list(self, path: str = "/work") -> builtins.list[Entry]:
        """What a directory holds, by name. Raises: OSError as `os.scandir` would."""
        ...

    async def snapshot(self, paths: Sequence[str] = ("/work",)) -> Snapshot:
        """The files below these directories, for another machine of any backend to start from."""
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Put a snapshot's files back where they were."""
        ...

    async def listen(self, port: int = 0) -> socket.socket:
        """A socket that listens on 127.0.0.1:`port` inside and belongs to the caller, who answers there.

        `getsockname()[1]` is the port inside. Connections it accepts are stream sockets, of whatever family.
        """
        ...

    async def connect(self, port: int, *, timeout_s: float = 10.0) -> socket.socket:
        """A connected, non-blocking stream socket to 127.0.0.1:`port` inside. Raises: OSError as `connect` would."""
        ...

    async def delete(self, why: str = "it was deleted") -> None:
        """End it, and everything in it. Doing it twice is harmless."""
        ...


class Machines(Protocol):
    """A pool of machines, used as `async with`; what it has made ends with it."""

    config: SandboxConfig

    @property
    def isolation(self) -> IsolationReport:
        """What was measured to be in force when the pool started. Raises: UserError before that."""
        ...

    @property
    def machines(self) -> Sequence[Machine]:
        """Those that this pool has made and that have not ended."""
        ...

    def get(self, machine_id: str) -> Machine:
        """A machine of this pool by its id; SandboxError when there is none."""
        ...

    async def create(self, config: MachineConfig | None = None, *, snapshot: Snapshot | None = None) -> Machine:
        """A new machine, with its first files in place. Raises: SandboxError if it cannot be made."""
        ...

    async def close(self) -> None:
        """End every machine of this pool. Safe to call twice."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Judge(CodeJudge, Protocol):
    """Judges code against tests, used as `async with`."""

    config: SandboxConfig

    @property
    def isolation(self) -> IsolationReport:
        """What was measured to be in force when the pool started. Raises: UserError before that."""
        ...

    async def close(self) -> None:
        """End it. Safe to call twice."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Backend(Protocol):
    """What a name in `SandboxConfig.backend` stands for. Neither method starts anything: `async with` does."""

    def judge(self, config: SandboxConfig) -> Judge:
        """A judge. Raises: UserError when this backend has none, or the config lacks what it needs."""
        ...

    def machines(self, config: SandboxConfig) -> Machines:
        """A pool of machines. Raises: UserError when this backend has none, or the config lacks what it needs."""
        ...
