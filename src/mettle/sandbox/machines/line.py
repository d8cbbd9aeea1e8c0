"""The line between a machine and its owner, as commands and transfers use it, whatever it is made of.

`Channel` is the one there is: a socket of this host, along which descriptors travel. A reader or writer comes with the
number of its other end, which the order that is to use it names; when the order has been sent the ends are let go.
Invariant: every order is answered once, by its answer or, when the machine has ended, by `MachineLost`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mettle.sandbox.machines.endings import MachineLost

__all__ = ["Answer", "Line", "MachineLost", "Reader", "ReaderEnd", "Sink", "Writer", "Writing"]

Sink = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """What process 1 says about one order, and the socket that it made for it."""

    header: dict[str, Any]
    passed: socket.socket | None = None


class Reader(Protocol):
    """Takes what a machine writes into a sink, until its end."""

    ended: asyncio.Event

    def pause(self) -> None:
        """Let the writer wait."""
        ...

    def resume(self) -> None: ...

    def discard(self) -> None:
        """Go on reading, for the sake of whoever still writes, and keep nothing."""
        ...

    def drain(self, max_bytes: int) -> None:
        """Take what is there now."""
        ...

    def close(self) -> None: ...


class Writer(Protocol):
    """Feeds bytes to a machine as it takes them; TimeoutError when it takes none for the time it was given."""

    async def write(self, data: bytes) -> None:
        """Write all of it; BrokenPipeError when nobody reads any more."""
        ...

    async def feed(self, data: bytes) -> None:
        """Write all of it, or as much as is wanted, and close."""
        ...

    def close(self) -> None: ...


class ReaderEnd(NamedTuple):
    """A reader, and the end for the machine."""

    reader: Reader
    end: int


class Writing(NamedTuple):
    """A writer, and the end for the machine."""

    writer: Writer
    end: int


class Line(Protocol):
    """The owner's end of the line."""

    closed: asyncio.Event
    gone: asyncio.Event
    """Set when no process of the machine is left, or when that is not asked any more."""

    @property
    def is_open(self) -> bool: ...

    def open_reader(self, sink: Sink) -> ReaderEnd:
        """A way for bytes out of the machine."""
        ...

    def open_writer(self, stall_s: float | None = None) -> Writing:
        """A way for bytes into the machine."""
        ...

    def let_go(self, ends: Sequence[int]) -> None:
        """The order that names these ends has been sent, or never will be."""
        ...

    async def order(self, header: dict[str, Any], ends: Sequence[int] = ()) -> tuple[int, asyncio.Future[Answer]]:
        """Send an order; its number, and the future of its answer."""
        ...

    async def ask(self, header: dict[str, Any], timeout_s: float) -> Answer:
        """Send an order and wait for its answer."""
        ...

    def hang_up(self) -> None:
        """Say that nothing more is coming; the machine ends."""
        ...

    def close(self) -> None:
        """Let go of the line; whoever waits is told that the machine is lost."""
        ...

    def let_go_of_process(self) -> None:
        """Whether the machine's processes have ended is not asked any more."""
        ...
