"""The owner's end of one cell: send it a solution and tests, receive what happened.

A cell serves one solution and ends. Whatever comes from it is data to be checked: lengths are limited before they are
read, and anything that is not a proper answer is a `CellLost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mettle.errors import SandboxError
from mettle.sandbox.zygote import frames
from mettle.sandbox.zygote.attempt import WALL_FACTOR
from mettle.sandbox.zygote.settings import CellLimits

_ANSWER_GRACE_S = 5.0
_MAX_ANSWER_BYTES = 256 << 20


class CellLost(SandboxError):
    """The cell ended, or stopped answering, before its answer came."""


class ProgramFile(NamedTuple):
    """A file for the read-only directory of a cell."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Program:
    """A command to execute instead of Python source. `{files}` and `{work}` in it are the cell's directories.

    `artifact` is the name of a file in `{work}` that is to come back, as a compiler's does.
    """

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    is_space_reserved: bool
    stack_bytes: int
    artifact: str = ""
    max_artifact_bytes: int = 0
    has_value: bool = False  # descriptor 3 takes one, as in a function-call test

    def header(self) -> dict[str, Any]:
        return {
            "argv": self.argv,
            "environment": dict(self.environment),
            "is_space_reserved": self.is_space_reserved,
            "stack_bytes": self.stack_bytes,
            "artifact": self.artifact,
            "max_artifact_bytes": self.max_artifact_bytes,
            "has_value": self.has_value,
        }


@dataclass(frozen=True, slots=True)
class TestOrder:
    """One test as the cell sees it: input and limits, and nothing of what is expected."""

    mode: str
    payload: bytes
    function: str | None
    cpu_s: float
    wall_s: float
    memory_bytes: int
    output_bytes: int
    program: Program | None = None  # in mode "program"
    is_live: bool = False  # its input comes while it runs, and its output is told at once

    __test__ = False

    def header(self, number: int, *, is_last: bool) -> dict[str, Any]:
        return {
            **(self.program.header() if self.program else {}),
            "run": number,
            "mode": self.mode,
            "function": self.function,
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
            "memory_bytes": self.memory_bytes,
            "output_bytes": self.output_bytes,
            "is_last": is_last,
            "is_live": self.is_live,
        }


@dataclass(frozen=True, slots=True)
class TestReport:
    """What a cell says about one test. `ended` is "exit", or the limit that ended it."""

    ended: str
    status: int
    wall_s: float
    cpu_s: float
    memory_bytes: int
    stdout: bytes
    stderr: bytes
    value: bytes
    is_worn: bool  # the test has touched the cell's files, so that the cell has ended
    has_outlived_input: bool = False  # of a live test: it still ran when its input was ended

    __test__ = False


class JudgeCell:
    """A single-use cell."""

    def __init__(
        self,
        number: int,
        generation: int,
        limits: CellLimits | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.number = number
        self.generation = generation
        self.limits = limits
        self._unsent: list[bytes] = []  # goes with the next order, so that the cell wakes up once
        self._reader = reader
        self._writer = writer
        self.cpu_meter = ""  # what counts the processor time of all its processes, if anything does
        self._on_close: Callable[[], None] | None = None
        self.is_finished = False  # its last test has been answered, so that it ends by itself

    @classmethod
    async def connect(
        cls,
        number: int,
        generation: int,
        limits: CellLimits | None,
        channel: socket.socket,
        on_close: Callable[[], None] | None = None,
    ) -> JudgeCell:
        """Take the owner's end of a cell's socket. `limits` are those that it was made with, None the usual ones."""
        reader, writer = await asyncio.open_unix_connection(sock=channel)
        cell = cls(number, generation, limits, reader, writer)
        cell._on_close = on_close
        return cell

    @property
    def is_alive(self) -> bool:
        return not (self._reader.at_eof() or self._writer.is_closing())

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the doors are shut; SandboxError with the reason if one does not shut."""
        header = (await self._receive(timeout_s)).header
        if "failed" in header:
            raise SandboxError(f"a cell could not be made: {str(header['failed'])[:500]}")
        if header.get("ready") is not True:
            raise CellLost("a cell's first message was not the expected one")
        self.cpu_meter = str(header.get("cpu_meter", ""))

    def load(self, source: bytes) -> None:
        """A solution in Python, for the next orders."""
        self._unsent.append(frames.encode({"load": True}, source))

    def load_files(self, files: Sequence[ProgramFile]) -> None:
        """Files to execute or read, in place of those before."""
        header = {"load": True, "files": [(file.name, len(file.data)) for file in files]}
        self._unsent.append(frames.encode(header, b"".join(file.data for file in files)))

    async def run(self, number: int, order: TestOrder, *, is_last: bool) -> TestReport:
        """Run one test; the cell enforces its limits, and a cell that does not answer in time is lost."""
        await self.start(number, order, is_last=is_last)
        answer = await self._receive(WALL_FACTOR * order.wall_s + _ANSWER_GRACE_S)
        return self._finish(answer, number, is_last=is_last)

    async def start(self, number: int, order: TestOrder, *, is_last: bool) -> None:
        """Begin one test; of one that is live, `hear` tells what happens."""
        self._unsent.append(frames.encode(order.header(number, is_last=is_last), order.payload))
        message, self._unsent = b"".join(self._unsent), []
        await self._send(message)

    def feed(self, number: int, data: bytes, *, is_end: bool) -> None:
        """Input for a live test. Its whole amount is limited by what the other side may print."""
        self._writer.write(frames.encode({"feed": number, "is_end": is_end}, data))

    async def hear(self, number: int, order: TestOrder) -> bytes | TestReport:
        """What a live test has printed (nothing: it has closed its output), or how it ended."""
        answer = await self._receive(WALL_FACTOR * order.wall_s + _ANSWER_GRACE_S)
        if answer.header.get("out") == number:
            return answer.payload
        return self._finish(answer, number, is_last=True)

    def _finish(self, answer: frames.Frame, number: int, *, is_last: bool) -> TestReport:
        try:
            report = _read_report(answer, number)
        except (KeyError, TypeError, ValueError) as error:
            raise CellLost(f"a cell's answer is not an answer: {type(error).__name__}") from error
        self.is_finished = is_last or report.is_worn
        return report

    def close(self) -> None:
        """Hang up; process 1 sees it, ends, and takes everything in the cell with it."""
        self._writer.close()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

    async def wait_closed(self) -> None:
        """Hang up and wait until the connection is gone."""
        self.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _send(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise CellLost("the cell ended") from error

    async def _receive(self, timeout_s: float) -> frames.Frame:
        try:
            async with asyncio.timeout(timeout_s):
                prefix = await self._reader.readexactly(frames.PREFIX.size)
                header_bytes, payload_bytes = frames.check_lengths(prefix, _MAX_ANSWER_BYTES)
                body = await self._reader.readexactly(header_bytes + payload_bytes)
            return frames.Frame(frames.decode_header(body[:header_bytes]), body[header_bytes:])
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise CellLost(f"the cell did not answer within {timeout_s:.1f} s") from error
            raise CellLost(f"the cell ended: {type(error).__name__}") from error


def _read_report(frame: frames.Frame, number: int) -> TestReport:
    header, payload = frame
    if header["done"] != number:
        raise ValueError("an answer to another test")
    out, err, value = (int(length) for length in header["lengths"])
    if min(out, err, value) < 0 or out + err + value != len(payload):
        raise ValueError("lengths do not add up")
    return TestReport(
        ended=str(header["ended"]),
        status=int(header["status"]),
        wall_s=float(header["wall_s"]),
        cpu_s=float(header["cpu_s"]),
        memory_bytes=int(header["memory_bytes"]),
        stdout=payload[:out],
        stderr=payload[out : out + err],
        value=payload[out + err :],
        is_worn=header["is_worn"] is True,
        has_outlived_input=header["has_outlived_input"] is True,
    )
