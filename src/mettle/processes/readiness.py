"""Whether a descriptor has something to read, whatever its number.

`select.select` refuses numbers above 1,023, which a process with many connections or children reaches; so the linter
bans it, and what waits for one descriptor asks here.
"""

from __future__ import annotations

import select
import socket


def is_readable(file: int | socket.socket, wait_s: float | None = 0.0) -> bool:
    """Whether something can be read, or the other end is gone; waits so long for that, with None without end."""
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(None if wait_s is None else max(0.0, wait_s) * 1e3))
