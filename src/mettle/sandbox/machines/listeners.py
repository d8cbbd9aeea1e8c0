"""Listening sockets of this process that stand for a port in a machine elsewhere.

For each connection that a program inside makes, one is made from here to the socket, which no network and no other user
can reach. Invariant: closing the socket closes the port inside.
"""

from __future__ import annotations

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
    """One with an address that this process alone can connect to.

    Its name in the file system is gone as soon as it is made, so that a killed process leaves none; the file is held.
    """

    _held: int = -1

    @classmethod
    def make(cls) -> Self:
        """A new one, listening; its port inside is not known yet."""
        made = cls(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with tempfile.TemporaryDirectory(prefix="mettle-port-") as directory:
                path = f"{directory}/port"
                made.bind(path)
                made._held = os.open(path, os.O_PATH | os.O_CLOEXEC)
            made.listen(_BACKLOG)
            made.setblocking(False)
        except BaseException:
            made.close()
            raise
        return made

    @property
    def address(self) -> str:
        """Where to connect to; no file any more once it is retired."""
        return f"/proc/self/fd/{self._held}"

    def retire(self) -> None:
        """Let nobody new in; the socket itself is its owner's to close."""
        self.on_close = None
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)

    def close(self) -> None:
        super().close()
        self.retire()
