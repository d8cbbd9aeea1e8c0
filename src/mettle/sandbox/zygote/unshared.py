"""Memory that no child of this process inherits: where process 1 keeps what goes into a test and what comes out of it.

The next test's process is forked from the same process 1, and could look through all of its memory. What is in these
buffers is not there: the kernel leaves their pages out of a fork (`MADV_DONTFORK`).
Invariant: a test's data is read into a buffer and written out of it without a copy in any Python object.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from typing import Final

_FIRST_BYTES: Final = 1 << 17


class UnsharedBuffer:
    """Bytes at the front of a mapping that grows; `length` is how many."""

    def __init__(self) -> None:
        self.length = 0
        self._map(_FIRST_BYTES)

    def _map(self, num_bytes: int) -> None:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        self._view = memoryview(memory)

    def extend(self, num_bytes: int) -> memoryview:
        """Room for so many more bytes, which now belong to it; views from before may look at what it was."""
        start, self.length = self.length, self.length + num_bytes
        if self.length > len(self._view):
            smaller = self._view
            self._map(max(self.length, 2 * len(smaller)))
            self._view[:start] = smaller[:start]
        return self._view[start : self.length]

    def read(self, descriptor: int, max_bytes: int) -> int:
        """Take what a descriptor gives; how much that was, 0 at its end. Raises: BlockingIOError."""
        start = self.length
        with self.extend(max_bytes) as room:
            self.length = start
            num_bytes = os.readv(descriptor, [room])
        self.length += num_bytes
        return num_bytes

    def view(self, start: int = 0, max_bytes: int | None = None) -> memoryview:
        """What is in it from there on."""
        end = self.length if max_bytes is None else min(self.length, start + max_bytes)
        return self._view[start:end]


def fill(channel: socket.socket, room: memoryview) -> bool:
    """Fill the room; False when the other side has gone."""
    while room:
        num_bytes = channel.recv_into(room)
        if num_bytes == 0:
            return False
        room = room[num_bytes:]
    return True


def send(channel: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    """All of the pieces, one after another, as they lie in memory."""
    waiting = [memoryview(piece) for piece in pieces if len(piece)]
    while waiting:
        num_sent = channel.sendmsg(waiting)
        while waiting and num_sent >= len(waiting[0]):
            num_sent -= len(waiting.pop(0))
        if num_sent:
            waiting[0] = waiting[0][num_sent:]
