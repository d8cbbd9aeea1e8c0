"""Numbered streams to and from the owner, each of which ends in a descriptor of the container.

A stream has a window: so many bytes may be on their way, and more only when the other end says that it has used some
(`credit`). So a slow reader makes its writer wait, and nobody else. Frames: `data` with bytes, `credit`, `end` (nothing
more comes), `drop` (nobody reads any more), `discard` (go on reading, and send nothing).
Invariant: neither end holds more than a window of a stream; a descriptor is closed exactly once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Any, Final, Protocol

WINDOW_BYTES: Final = 1 << 18
_READ_BYTES: Final = 1 << 16
_PIPE_BYTES: Final = 1 << 20  # no pipe holds more


class Sender(Protocol):
    """Where frames go."""

    @property
    def is_full(self) -> bool: ...

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None: ...


class Stream:
    """One stream: `source` is read for the owner, `sink` is written for it; a socket is both."""

    def __init__(self, number: int, source: int | None, sink: int | None, connection: socket.socket | None) -> None:
        self.number = number
        self.source = source
        self.sink = sink
        self._connection = connection
        self.credit = WINDOW_BYTES
        self.pending = bytearray()
        self.is_ending = False
        self.is_discarding = False
        self.is_over = False  # the command has ended: nobody waits for what it did not read

    def close_source(self) -> None:
        if self.source is not None and self._connection is None:
            os.close(self.source)
        self.source = None
        self._close_if_done()

    def close_sink(self) -> None:
        if self.sink is not None:
            if self._connection is None:
                os.close(self.sink)
            else:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_WR)
        self.sink = None
        self.pending.clear()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._connection is not None and self.source is None and self.sink is None:
            self._connection.close()
            self._connection = None


class Streams:
    """All streams of an agent."""

    def __init__(self, wire: Sender) -> None:
        self._wire = wire
        self._streams: dict[int, Stream] = {}

    def add_source(self, number: int, descriptor: int) -> None:
        """Send the owner what comes out of a descriptor, which becomes this object's to close."""
        os.set_blocking(descriptor, False)
        self._streams[number] = Stream(number, descriptor, None, None)

    def add_sink(self, number: int, descriptor: int) -> None:
        """Write what the owner sends."""
        os.set_blocking(descriptor, False)
        self._streams[number] = Stream(number, None, descriptor, None)

    def add_socket(self, number: int, connection: socket.socket) -> None:
        """Both."""
        connection.setblocking(False)
        self._streams[number] = Stream(number, connection.fileno(), connection.fileno(), connection)

    def interest(self) -> dict[int, int]:
        """What each descriptor is to be polled for."""
        wanted: dict[int, int] = {}
        for stream in self._streams.values():
            is_wanted = stream.is_discarding or (stream.credit > 0 and not self._wire.is_full)
            if stream.source is not None and is_wanted:
                wanted[stream.source] = wanted.get(stream.source, 0) | select.POLLIN
            if stream.sink is not None and stream.pending:
                wanted[stream.sink] = wanted.get(stream.sink, 0) | select.POLLOUT
        return wanted

    def attend(self, ready: set[int]) -> None:
        """Move what can be moved."""
        for stream in list(self._streams.values()):
            if stream.source in ready and (stream.is_discarding or stream.credit > 0):
                self._read(stream, stream.credit)
            if stream.sink in ready:
                self._write(stream)
        self._forget_closed()

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        """A frame from the owner about a stream. One that is closed already is no matter."""
        kind = next(kind for kind in ("data", "credit", "end", "drop", "discard") if kind in header)
        stream = self._streams.get(header[kind])
        if stream is None:
            if kind == "data":
                self._wire.send({"drop": header[kind]})
            return
        match kind:
            case "data":
                self._accept(stream, payload)
            case "credit":
                stream.credit += header["bytes"]
            case "end":
                stream.is_ending = True
                self._write(stream)
            case "drop":
                self._wire.send({"end": stream.number})
                stream.close_source()
            case _:
                stream.is_discarding = True
        self._forget_closed()

    def flush(self, numbers: list[int]) -> None:
        """The command has ended: send what it has left in its pipes, and wait no longer for it to read."""
        for number in numbers:
            stream = self._streams.get(number)
            if stream is None:
                continue
            stream.is_over = True
            if stream.source is not None and not stream.is_discarding:
                left = _PIPE_BYTES
                while left > 0 and (num_read := self._read(stream, left)):
                    left -= num_read
            if stream.sink is not None and stream.is_ending:
                stream.close_sink()
        self._forget_closed()

    def close(self, number: int) -> None:
        """End a stream at once."""
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.close_sink()
            stream.close_source()

    def _forget_closed(self) -> None:
        for number in [n for n, stream in self._streams.items() if stream.source is None and stream.sink is None]:
            del self._streams[number]

    def _read(self, stream: Stream, max_bytes: int) -> int:
        """Send what is there now; the number of bytes."""
        assert stream.source is not None, "a stream without a source is not read"
        try:
            data = os.read(stream.source, _READ_BYTES if stream.is_discarding else min(_READ_BYTES, max_bytes))
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._wire.send({"end": stream.number})
            stream.close_source()
        elif not stream.is_discarding:
            stream.credit -= len(data)
            self._wire.send({"data": stream.number}, data)
        return len(data)

    def _accept(self, stream: Stream, data: bytes) -> None:
        if stream.sink is None:
            self._wire.send({"drop": stream.number})
            return
        if len(stream.pending) + len(data) > 2 * WINDOW_BYTES:
            raise ValueError("the owner sends more than it was allowed")
        stream.pending += data
        self._write(stream)

    def _write(self, stream: Stream) -> None:
        num_written = 0
        try:
            while stream.pending and stream.sink is not None:
                num = os.write(stream.sink, stream.pending[:_READ_BYTES])
                del stream.pending[:num]
                num_written += num
        except BlockingIOError:
            pass
        except OSError:
            self._wire.send({"drop": stream.number})
            stream.close_sink()
        if num_written:
            self._wire.send({"credit": stream.number, "bytes": num_written})
        if stream.is_ending and stream.sink is not None and (not stream.pending or stream.is_over):
            stream.close_sink()
