"""How a pool and a place know each other: both prove that they have the run's key, and neither sends it.

    place ──► nonce (32 bytes)
    pool  ──► nonce (32 bytes), HMAC-SHA256(key, "pool" + both nonces)
    place ──► HMAC-SHA256(key, "place" + both nonces)

Invariant: before the proof nothing is read but bytes of a fixed number, so that a stranger can have nothing parsed.
"""

from __future__ import annotations

import hmac
import secrets
import socket

NONCE_BYTES = 32
KEEPALIVE_S = 10
KEEPALIVE_PROBES = 3
UNANSWERED_MS = 30_000


class NotKnown(ConnectionError):
    """The other side does not have the key of this run, or is no part of one."""


def admit(connection: socket.socket, key: str) -> None:
    """At a place: let a pool in. Raises: NotKnown; OSError when it is gone or too slow."""
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    theirs, proof = _read(connection, NONCE_BYTES), _read(connection, NONCE_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"pool", ours, theirs)):
        raise NotKnown("a stranger was turned away")
    connection.sendall(_proof(key, b"place", ours, theirs))


def enter(connection: socket.socket, key: str) -> None:
    """In a pool: be let in at a place. Raises: NotKnown; OSError when it is gone or too slow."""
    theirs, ours = _read(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours + _proof(key, b"pool", theirs, ours))
    if not hmac.compare_digest(_read(connection, NONCE_BYTES), _proof(key, b"place", theirs, ours)):
        raise NotKnown("what listens there is no place of this run")


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end the connection when the other host is gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_KEEPIDLE": KEEPALIVE_S, "TCP_KEEPINTVL": KEEPALIVE_S, "TCP_KEEPCNT": KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": UNANSWERED_MS,
    }  # fmt: skip
    for name, value in wanted.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _proof(key: str, side: bytes, of_place: bytes, of_pool: bytes) -> bytes:
    return hmac.digest(key.encode(), side + of_place + of_pool, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = connection.recv(size - len(found))
        if not piece:
            raise NotKnown("the other side hung up on a proof of the run's key")
        found += piece
    return found
