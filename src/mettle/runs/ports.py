"""Ports of this machine: whether one is free, asked before anything is made, and one that is."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


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
    """A port that nobody listens on now."""
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port
