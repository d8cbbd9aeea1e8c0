"""The agent's end of the stream to its owner: frames out of bytes, and back, without ever waiting.

Invariant: what is sent goes out in order; a frame over its limits, or a record that is forged, ends the wire.
"""

from __future__ import annotations

import os
from typing import Any, Final

from mettle.sandbox.containers.agent.seal import Seal
from mettle.sandbox.zygote import frames

MAX_PAYLOAD_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 18
_FULL_BYTES: Final = 1 << 20


class FrameReader:
    """Frames out of a stream of bytes."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[frames.Frame]:
        """The frames that are complete now. Raises: ValueError for what is none."""
        self._received += data
        found = []
        while len(self._received) >= frames.PREFIX.size:
            lengths = frames.check_lengths(bytes(self._received[: frames.PREFIX.size]), MAX_PAYLOAD_BYTES)
            end = frames.PREFIX.size + sum(lengths)
            if len(self._received) < end:
                break
            body = bytes(self._received[frames.PREFIX.size : end])
            found.append(frames.Frame(frames.decode_header(body[: lengths[0]]), body[lengths[0] :]))
            del self._received[:end]
        return found


class Wire:
    """Two descriptors (of a socket: one, twice), neither of which ever blocks. The seal, if any, is agreed."""

    def __init__(self, read_fd: int, write_fd: int, seal: Seal | None = None) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._seal = seal
        self._frames = FrameReader()
        self._out = bytearray()
        for descriptor in {read_fd, write_fd}:
            os.set_blocking(descriptor, False)

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._out)

    @property
    def is_full(self) -> bool:
        """Whether the owner is behind, so that nothing should be read for it."""
        return len(self._out) > _FULL_BYTES

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Queue one frame."""
        data = frames.encode(header, payload)
        self._out += data if self._seal is None else self._seal.close(data)

    def receive(self) -> list[frames.Frame] | None:
        """What has come; None when the owner has gone, or is not the owner."""
        try:
            data = os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        try:
            return self._frames.feed(data if self._seal is None else self._seal.open(data))
        except ValueError:
            return None

    def flush(self) -> bool:
        """Send what the descriptor takes; False when nobody is there any more."""
        try:
            while self._out:
                del self._out[: os.write(self.write_fd, self._out[:_READ_BYTES])]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True
