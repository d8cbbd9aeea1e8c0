"""Commands for a machine: what to run as one value, and the one place where the arguments of `exec` stand.

Parts: `CommandSpec`; `ExecResult`, `Chunk`, `Output`; `Job` and `Stream`, handles of those that run; `CommandRunner`,
the methods for people over those that an implementation has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self

from mettle.sandbox.machines.config import check_environment

StreamName = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """What to run, and within which limits. `timeout_s` None is without end."""

    command: str | tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    stdin: bytes | None
    timeout_s: float | None
    max_output_bytes: int

    @classmethod
    def make(
        cls,
        command: str | Sequence[str],
        cwd: str,
        env: Mapping[str, str] | None,
        stdin: bytes | str | None,
        timeout_s: float | None,
        max_output_bytes: int,
    ) -> Self:
        """From what a caller gives. Raises: UserError for an environment that no process can have."""
        words = command if isinstance(command, str) else tuple(command)
        data = stdin.encode() if isinstance(stdin, str) else stdin
        return cls(words, cwd, check_environment(env or {}), data, timeout_s, max_output_bytes)

    @property
    def argv(self) -> list[str]:
        """A string is for the shell."""
        return ["sh", "-c", self.command] if isinstance(self.command, str) else list(self.command)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended.

    `exit_code` is 128 + n after signal n, and None when the command was ended by its time limit or by its owner.
    Of output over the limit the beginning and the end are kept (`is_truncated`).
    """

    exit_code: int | None
    stdout: str
    stderr: str
    is_timed_out: bool = False
    is_truncated: bool = False
    duration_s: float = 0.0
    is_out_of_memory: bool = False


class Chunk(NamedTuple):
    """A piece of output as it came."""

    stream: StreamName
    data: bytes


class Output(NamedTuple):
    """What a command has written so far."""

    stdout: str
    stderr: str


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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk: ...

    async def aclose(self) -> None:
        """End the command if it still runs."""
        ...


class CommandRunner(Protocol):
    """`exec`, `stream` and `start` for people, made of what an implementation has: the same of a `CommandSpec`."""

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
        Raises: SandboxError only if the machine is gone; whatever the command does is a result.
        """
        return await self.exec_command(CommandSpec.make(command, cwd, env, stdin, timeout_s, max_output_bytes))

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
        return self.stream_command(CommandSpec.make(command, cwd, env, stdin, timeout_s, max_output_bytes))

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
        return await self.start_command(CommandSpec.make(command, cwd, env, stdin, timeout_s, max_output_bytes))

    async def exec_command(self, spec: CommandSpec) -> ExecResult: ...

    def stream_command(self, spec: CommandSpec) -> Stream: ...

    async def start_command(self, spec: CommandSpec) -> Job: ...
