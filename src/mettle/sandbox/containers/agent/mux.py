"""Several streams of bytes over one, as both ends know it: what the HTTP connections to an agent travel in.

A container has no network, and what Docker attaches is one stream; another process in the container for each
connection (`docker exec`) would cost a start each, and be within reach of the code. A frame is a kind, the number of a
channel and a number of bytes. The owner opens a channel by using a new number; a channel has a window, so that who
reads slowly holds up nobody but its own writer.
Invariant: neither end holds more than a window of what a channel brings; a channel ends once in each direction, or at
once in both (`RESET`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

WINDOW_BYTES: Final = 1 << 19
MAX_DATA_BYTES: Final = 1 << 16
DATA, CREDIT, END, RESET, PING = range(5)
_HEAD: Final = struct.Struct(">BII")


class MuxChannel:
    """One end of one stream. Whoever uses it overrides what happens to it."""

    def __init__(self, mux: Mux, number: int) -> None:
        self._mux = mux
        self._number = number
        self._num_taken = 0  # and not yet told
        self._num_untaken = 0
        self.credit = WINDOW_BYTES
        self.has_sent_all = self.has_all = False

    def send(self, data: bytes) -> int:
        """Send as much as the other end has room for; how much that was."""
        num = min(len(data), self.credit)
        self.credit -= num
        for start in range(0, num, MAX_DATA_BYTES):
            self._mux.send(DATA, self._number, data[start : min(num, start + MAX_DATA_BYTES)])
        return num

    def took(self, num_bytes: int) -> None:
        """So much of what came is used, and as much may follow."""
        self._num_taken += num_bytes
        self._num_untaken -= num_bytes
        if self._num_taken >= WINDOW_BYTES // 4 and not self.has_all:
            self._mux.send(CREDIT, self._number, num=self._num_taken)
            self._num_taken = 0

    def end(self) -> None:
        """Nothing more is sent from here."""
        if not self.has_sent_all:
            self.has_sent_all = True
            self._mux.send(END, self._number)
            self._mux.forget(self._number)

    def reset(self) -> None:
        """End it both ways, at once."""
        if not (self.has_sent_all and self.has_all):
            self.has_sent_all = self.has_all = True
            self._mux.send(RESET, self._number)
            self._mux.forget(self._number)

    def receive(self, kind: int, num: int, data: bytes) -> None:
        """A frame. Raises: ValueError for more than the other end was allowed."""
        if kind == DATA:
            self._num_untaken += len(data)
            if self._num_untaken > WINDOW_BYTES or self.has_all:
                raise ValueError("the other end sends more than it was allowed")
            self.on_data(data)
        elif kind == CREDIT:
            self.credit += num
            self.on_credit()
        elif kind == END:
            self.has_all = True
            self._mux.forget(self._number)
            self.on_end()
        else:
            self.has_sent_all = self.has_all = True
            self._mux.forget(self._number)
            self.on_reset()

    def on_data(self, data: bytes) -> None: ...

    def on_credit(self) -> None: ...

    def on_end(self) -> None: ...

    def on_reset(self) -> None: ...


class Mux:
    """All channels of one stream. `write` takes what goes out; `accept` is told of channels that the owner opens."""

    def __init__(self, write: Callable[[bytes], None], accept: Callable[[Mux, int], MuxChannel] | None = None) -> None:
        self._write = write
        self._accept = accept
        self._received = bytearray()
        self._last = 0
        self.channels: dict[int, MuxChannel] = {}

    def open(self, make: Callable[[Mux, int], MuxChannel]) -> MuxChannel:
        self._last += 1
        channel = self.channels[self._last] = make(self, self._last)
        return channel

    def send(self, kind: int, number: int, data: bytes = b"", num: int = 0) -> None:
        self._write(_HEAD.pack(kind, number, num or len(data)) + data)

    def forget(self, number: int) -> None:
        """Let go of a channel that has ended both ways."""
        channel = self.channels.get(number)
        if channel is not None and channel.has_sent_all and channel.has_all:
            del self.channels[number]

    def feed(self, data: bytes) -> None:
        """What has come. Raises: ValueError for what the other end cannot have sent."""
        self._received += data
        start = 0
        while len(self._received) >= start + _HEAD.size:
            kind, number, num = _HEAD.unpack_from(self._received, start)
            body = start + _HEAD.size
            size = num if kind == DATA else 0
            if kind > PING or size > MAX_DATA_BYTES:
                raise ValueError(f"a frame of kind {kind} with {num} bytes")
            if len(self._received) < body + size:
                break
            start = body + size
            self._deliver(kind, number, num, bytes(self._received[body:start]))
        del self._received[:start]

    def _deliver(self, kind: int, number: int, num: int, data: bytes) -> None:
        if kind == PING:
            if self._accept is not None:
                self.send(PING, number)
            return
        if self._accept is not None and kind == DATA and number > self._last:
            self._last = number
            self.channels[number] = self._accept(self, number)
        channel = self.channels.get(number)
        if channel is not None:
            channel.receive(kind, num, data)
