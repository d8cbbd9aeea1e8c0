"""Messages on a stream socket: two lengths, a JSON header, and raw bytes. Nothing is ever pickled.

Invariant: a frame is read whole or not at all; a length over the limit is refused before anything is allocated.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Final, NamedTuple

from mettle.sandbox.zygote.unshared import UnsharedBuffer, fill

PREFIX: Final = struct.Struct(">II")
MAX_HEADER_BYTES: Final = 1 << 20
_MAX_ORDER_BYTES: Final = 1 << 30
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
_scan: Final = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


class Order(NamedTuple):
    """A frame whose payload lies in a buffer, and the header's text."""

    header: dict[str, Any]
    text: bytes
    payload: memoryview


class Frame(NamedTuple):
    """One message: what it says, and bytes that it carries."""

    header: dict[str, Any]
    payload: bytes = b""


def encode(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """The bytes of one frame."""
    return encode_header(header, len(payload)) + payload


def encode_header(header: dict[str, Any], payload_bytes: int) -> bytes:
    """The bytes of a frame up to its payload."""
    text = encode_text(header)
    return PREFIX.pack(len(text), payload_bytes) + text


def encode_text(header: dict[str, Any]) -> bytes:
    """A header without its length."""
    return _encode(header).encode()


def decode_header(text: bytes) -> dict[str, Any]:
    """The header of a frame; ValueError if it is not a JSON object."""
    try:
        decoded = text.decode()
        header, end = _scan(decoded, 0)
    except RecursionError:
        raise ValueError("a frame's header nests too deep") from None
    except StopIteration:
        raise ValueError("a frame's header is not JSON") from None
    if end != len(decoded):
        raise ValueError("a frame's header goes on behind its end")
    if not isinstance(header, dict):
        raise ValueError(f"a frame's header must be an object, not {type(header).__name__}")
    return header


def check_lengths(prefix: bytes, max_payload_bytes: int) -> tuple[int, int]:
    """The two lengths of a frame; ValueError if one is over its limit."""
    header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > max_payload_bytes:
        raise ValueError(f"a frame of {header_bytes} + {payload_bytes} bytes is over the limit")
    return header_bytes, payload_bytes


def receive(channel: socket.socket, max_payload_bytes: int = 1 << 30) -> Frame | None:
    """The next frame, or None when the other side has gone."""
    prefix = receive_exactly(channel, PREFIX.size)
    if prefix is None:
        return None
    header_bytes, payload_bytes = check_lengths(prefix, max_payload_bytes)
    body = receive_exactly(channel, header_bytes + payload_bytes)
    if body is None:
        return None
    return Frame(decode_header(body[:header_bytes]), body[header_bytes:])


def receive_order(channel: socket.socket, buffer: UnsharedBuffer) -> Order | None:
    """The next frame, its payload in place of what the buffer held, or None when the other side has gone."""
    prefix = receive_exactly(channel, PREFIX.size)
    if prefix is None:
        return None
    header_bytes, payload_bytes = check_lengths(prefix, _MAX_ORDER_BYTES)
    text = receive_exactly(channel, header_bytes)
    buffer.length = 0
    payload = buffer.extend(payload_bytes)
    if text is None or not fill(channel, payload):
        return None
    return Order(decode_header(text), text, payload)


def receive_with_descriptors(channel: socket.socket, max_descriptors: int) -> tuple[Frame, list[int]] | None:
    """The next frame and the descriptors that came with it, or None when the other side has gone."""
    prefix, descriptors, _, _ = socket.recv_fds(channel, PREFIX.size, max_descriptors)
    if 0 < len(prefix) < PREFIX.size:
        prefix += receive_exactly(channel, PREFIX.size - len(prefix)) or b""
    if len(prefix) < PREFIX.size:
        return None
    body = receive_exactly(channel, sum(check_lengths(prefix, MAX_HEADER_BYTES)))
    if body is None:
        return None
    header_bytes = PREFIX.unpack(prefix)[0]
    return Frame(decode_header(body[:header_bytes]), body[header_bytes:]), descriptors


def receive_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    """So many bytes, or None when the other side has gone."""
    pieces = bytearray()
    while len(pieces) < num_bytes:
        piece = channel.recv(min(num_bytes - len(pieces), 1 << 20))
        if not piece:
            return None
        pieces += piece
    return bytes(pieces)
