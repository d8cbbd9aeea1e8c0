"""Ports of this machine: whether one is free, asked before anything is made, and one that is."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

LOOPBACK = "127.0.0.1"
_LOWEST: Final = 20_000
_TRIES: Final = 64
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The first and the last port that the system gives to whoever asks for any, connections included."""


def is_port_free(port: int, host: str = LOOPBACK) -> bool:
    """True when a server could listen on `port` now; 0 stands for any free one."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str = LOOPBACK) -> int:
    """A port that nobody listens on now.

    On loopback it is one that the system gives to nobody by itself: until a new process listens there, which takes
    seconds, a connection of any program could be given another, and the process would find it in use.
    """
    if host == LOOPBACK and (end := _first_given()) > _LOWEST:
        for _ in range(_TRIES):
            port = random.SystemRandom().randrange(_LOWEST, end)
            if is_port_free(port):
                return port
    with socket.create_server((host, 0)) as server:
        given: int = server.getsockname()[1]
        return given


def _first_given() -> int:
    try:
        return int(_GIVEN.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
