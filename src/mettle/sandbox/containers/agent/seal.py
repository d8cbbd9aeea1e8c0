"""A stream of bytes between two ends that share a token, across a network that others can reach.

Each end sends 32 random bytes; the keys of both directions come from the token and both of these. Every record carries
a code over its number and its bytes, so that what is forged, repeated, left out or turned around is refused.
Invariant: no byte of a record is handed on before its code has been checked. The bytes are not kept secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Final

NONCE_BYTES: Final = 32
MAX_RECORD_BYTES: Final = 1 << 18
_LENGTH: Final = struct.Struct(">I")
_NUMBER: Final = struct.Struct(">Q")
_CODE_BYTES: Final = 32


class Forged(ValueError):
    """A record is not what the other end has sent."""


class Seal:
    """One end of a stream; `is_owner` says which. Send `hello` first, then give `open` all that comes."""

    def __init__(self, token: bytes, *, is_owner: bool, nonce: bytes | None = None) -> None:
        self._token = token
        self._is_owner = is_owner
        self.hello = nonce or os.urandom(NONCE_BYTES)
        self._received = bytearray()
        self._key_out = self._key_in = b""
        self._num_out = self._num_in = 0

    @property
    def is_agreed(self) -> bool:
        """Whether the other end's nonce has come, so that records can be made."""
        return bool(self._key_out)

    def close(self, data: bytes) -> bytes:
        """The records that carry these bytes."""
        pieces = []
        for start in range(0, len(data), MAX_RECORD_BYTES):
            piece = data[start : start + MAX_RECORD_BYTES]
            code = self._code(self._key_out, self._num_out, piece)
            self._num_out += 1
            pieces.append(_LENGTH.pack(len(piece)) + code + piece)
        return b"".join(pieces)

    def open(self, data: bytes) -> bytes:
        """The bytes of all records that are complete. Raises: Forged."""
        self._received += data
        if not self.is_agreed:
            if len(self._received) < NONCE_BYTES:
                return b""
            self._agree(bytes(self._received[:NONCE_BYTES]))
            del self._received[:NONCE_BYTES]
        opened = bytearray()
        while (piece := self._next()) is not None:
            opened += piece
        return bytes(opened)

    def _agree(self, other: bytes) -> None:
        nonces = self.hello + other if self._is_owner else other + self.hello
        keys = [hmac.new(self._token, label + nonces, hashlib.sha256).digest() for label in (b"owner", b"agent")]
        self._key_out, self._key_in = keys if self._is_owner else reversed(keys)

    def _next(self) -> bytes | None:
        start = _LENGTH.size + _CODE_BYTES
        if len(self._received) < start:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_RECORD_BYTES:
            raise Forged(f"a record of {length} bytes")
        if len(self._received) < start + length:
            return None
        piece = bytes(self._received[start : start + length])
        code = bytes(self._received[_LENGTH.size : start])
        if not hmac.compare_digest(code, self._code(self._key_in, self._num_in, piece)):
            raise Forged("a record whose code is wrong: another token, or bytes changed on the way")
        self._num_in += 1
        del self._received[: start + length]
        return piece

    @staticmethod
    def _code(key: bytes, number: int, piece: bytes) -> bytes:
        return hmac.new(key, _NUMBER.pack(number) + piece, hashlib.sha256).digest()
