"""Listening sockets of this process that stand for a port in a machine elsewhere.

For each connection that a program inside makes, one is made from here to the socket, which no network and no other user
can reach. Invariant: closing the socket closes the port inside.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from typing import Any, Final, Self

_BACKLOG: Final = 128


class FarListener(socket.socket):
    """Listens in a machine elsewhere: `accept` gives its connections, `getsockname` its address there."""

    inside_port: int
    on_close: Any = None

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", self.inside_port)

    def close(self) -> None:
        super().close()
        if self.on_close is not None:
            self.on_close()
            self.on_close = None


class PrivateListener(FarListener):
    """One with an address of its own, in a directory that is removed when it is closed."""

    address: str = ""

    @classmethod
    def make(cls) -> Self:
        """A new one, listening; its port inside is not known yet."""
        made = cls(socket.AF_UNIX, socket.SOCK_STREAM)
        made.address = f"{tempfile.mkdtemp(prefix='mettle-port-')}/port"
        try:
            made.bind(made.address)
            made.listen(_BACKLOG)
            made.setblocking(False)
        except BaseException:
            made.close()
            raise
        return made

    def retire(self) -> None:
        """Let nobody new in; the socket itself is its owner's to close."""
        self.on_close = None
        with contextlib.suppress(OSError):
            os.unlink(self.address)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.address))

    def close(self) -> None:
        super().close()
        self.retire()
