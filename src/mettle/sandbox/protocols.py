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
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from mettle.sandbox.config import SandboxConfig
    from mettle.sandbox.isolation import IsolationReport
    from mettle.sandbox.judge.verdicts import Checker, JudgeResult, Test
    from mettle.sandbox.machines.config import MachineConfig
    from mettle.sandbox.machines.execution import Chunk, ExecResult, Output
    from mettle.sandbox.machines.files import Content, Entry, Snapshot


class Job(Protocol):
    """A command in the background; it ends by itself, by its time limit, by `kill`, or with its machine."""

    id: str

    def poll(self) -> ExecResult | None:
        """The result, or None while it runs."""
        ...

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        """Wait for the result; None when it still runs after `timeout_s`."""
        ...

    async def output(self) -> Output:
        """What it has written so far."""
        ...

    async def kill(self) -> ExecResult:
        """End it, and everything that it has started. Doing it twice gives the same result."""
        ...


class Stream(Protocol):
    """The output of a command as it comes; whoever reads slowly makes the command wait, and leaving ends it."""

    @property
    def result(self) -> ExecResult | None:
        """How the command ended; None while it runs."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    async def __anext__(self) -> Chunk: ...

    async def aclose(self) -> None:
        """End the command if it still runs."""
        ...


@runtime_checkable
class Machine(Protocol):
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

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "/work",
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = 30.0,
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a command (a string by `sh -c`) and wait for its first process to end.

        What it leaves in the background lives on; at the time limit, or when the caller is cancelled, all is ended.
        """
        ...

    def stream(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "/work",
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = 30.0,
        max_output_bytes: int = 1 << 20,
    ) -> Stream:
        """Like `exec`, with the output as it comes; the limit is only of what the result keeps."""
        ...

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "/work",
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int = 1 << 20,
    ) -> Job:
        """Run a command in the background."""
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


class Judge(Protocol):
    """Judges code against tests, used as `async with`."""

    config: SandboxConfig

    @property
    def isolation(self) -> IsolationReport:
        """What was measured to be in force when the pool started. Raises: UserError before that."""
        ...

    async def judge(
        self,
        code: str,
        tests: Sequence[Test],
        *,
        timeout_s: float | None = None,
        memory_mb: int | None = None,
        language: str = "python",
        checker: Checker | None = None,
        stop_at_first_failure: bool = False,
        num_parallel: int = 1,
    ) -> JudgeResult:
        """The verdict of the code on each test, each run in a process and file system of its own.

        Raises: UserError for what the caller got wrong; SandboxError if the sandbox itself failed, CheckerError if the
        checker did.
        """
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
