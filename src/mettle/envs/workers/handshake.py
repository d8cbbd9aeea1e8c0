"""How a pool and a place know each other: both prove that they have the run's key, and neither sends it.

    place ──► nonce (32 bytes)
    pool  ──► nonce (32 bytes), HMAC-SHA256(key, "pool" + both nonces)
    place ──► HMAC-SHA256(key, "place" + both nonces)

Parts: `KeyProof` (the place's side, which never waits), `enter` (the pool's, which does), `keep_alive`. Invariant:
before the proof nothing is read but bytes of a fixed number, so that a stranger can have nothing parsed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

NONCE_BYTES = 32
KEEPALIVE_S = 10
KEEPALIVE_PROBES = 3
UNANSWERED_MS = 30_000


class NotKnown(ConnectionError):
    """The other side does not have the key of this run, or is no part of one."""


class KeyProof:
    """At a place: a pool's proof, as it comes in over a connection that no longer blocks."""

    def __init__(self, connection: socket.socket, key: str) -> None:
        """Raises: OSError when the other side is gone."""
        self._connection = connection
        self._key = key
        self._ours = secrets.token_bytes(NONCE_BYTES)
        self._heard = b""
        connection.setblocking(False)
        connection.sendall(self._ours)  # what is sent first fits into the kernel's buffer

    def hear(self) -> bool:
        """Read what is there; whether the proof is complete. Raises: NotKnown; OSError when the other side is gone."""
        try:
            piece = self._connection.recv(2 * NONCE_BYTES - len(self._heard))
        except BlockingIOError:
            return False
        if not piece:
            raise _hung_up()
        self._heard += piece
        if len(self._heard) < 2 * NONCE_BYTES:
            return False
        theirs, proof = self._heard[:NONCE_BYTES], self._heard[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._key, b"pool", self._ours, theirs)):
            raise NotKnown("a stranger was turned away")
        self._connection.sendall(_proof(self._key, b"place", self._ours, theirs))
        return True


def enter(connection: socket.socket, key: str, within_s: float) -> None:
    """In a pool: be let in at a place. Raises: NotKnown; OSError when it is gone, or slower in all than `within_s`."""
    deadline, before = time.monotonic() + within_s, connection.gettimeout()
    theirs, ours = _read(connection, deadline), secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours + _proof(key, b"pool", theirs, ours))
    if not hmac.compare_digest(_read(connection, deadline), _proof(key, b"place", theirs, ours)):
        raise NotKnown("what listens there is no place of this run")
    connection.settimeout(before)


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


def _read(connection: socket.socket, deadline: float) -> bytes:
    """As many bytes as a nonce and a proof have."""
    found = b""
    while len(found) < NONCE_BYTES:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the other side did not prove in time that it has the run's key")
        connection.settimeout(left_s)
        piece = connection.recv(NONCE_BYTES - len(found))
        if not piece:
            raise _hung_up()
        found += piece
    return found


def _hung_up() -> NotKnown:
    return NotKnown("the other side hung up on a proof of the run's key")
