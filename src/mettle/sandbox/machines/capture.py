"""What is kept of a command's output. Standard library only: the agent in a container has it, too."""

from __future__ import annotations


class OutputCapture:
    """The beginning and the end of a stream of bytes, `max_bytes` together; the middle of a longer one is left out."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.num_bytes = 0

    @property
    def is_truncated(self) -> bool:
        return self.num_bytes > self._max_bytes

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        half = self._max_bytes // 2
        room = half - len(self._head)
        self._head += data[:room]
        self._tail += data[max(0, room) :]
        if len(self._tail) > 2 * self._max_bytes:
            del self._tail[: -self._max_bytes]

    def text(self) -> str:
        """What was written; where bytes were left out, a line says how many."""
        if not self.is_truncated:
            return (self._head + self._tail).decode(errors="replace")
        tail = self._tail[len(self._tail) - (self._max_bytes - len(self._head)) :]
        num_missing = self.num_bytes - len(self._head) - len(tail)
        gap = f"\n[... {num_missing} bytes left out ...]\n"
        return self._head.decode(errors="replace") + gap + tail.decode(errors="replace")
