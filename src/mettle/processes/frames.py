"""Messages between a process and its children, or its workers on other machines: frames over a pipe or a socket.

A frame is two big-endian u32, two lengths, and then two parts of those lengths. Parts: `pack` and `lengths_of`, for any
bytes; `encode`, `decode`, `send`/`receive` (blocking), `read_frame` (asyncio), for JSON (an object in UTF-8) with raw
numbers beside it: under `arrays` it lists a typecode and a count for each array in the numbers, in machine order (both
ends are one machine, or two that have agreed on theirs). Invariants: decoding
builds dicts, lists, text, numbers and arrays and nothing else, no text inside a message can pass for an array, and text
arrives as the same code points, halves of surrogate pairs that stand by themselves or side by side included; a
frame above `MAX_FRAME_BYTES` is refused on both sides.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from mettle.errors import ServiceError

HEADER = struct.Struct(">II")
MAX_FRAME_BYTES = 1 << 30
TYPECODES = frozenset("hid")
Frame = dict[str, Any]


def pack(first: bytes, second: bytes = b"") -> bytes:
    """A frame of two parts, the second of which may be empty.

    Raises: ServiceError when it is too large.
    """
    if (size := len(first) + len(second)) > MAX_FRAME_BYTES:
        raise ServiceError(f"a frame of {size} bytes is above the limit of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(first), len(second)) + first + second


def lengths_of(header: bytes) -> tuple[int, int]:
    """The lengths of the two parts that follow a frame's first `HEADER.size` bytes.

    Raises: ServiceError when they are above the limit.
    """
    first, second = HEADER.unpack(header)
    if first + second > MAX_FRAME_BYTES:
        raise ServiceError(f"a frame of {first + second} bytes is above the limit of {MAX_FRAME_BYTES}")
    return first, second


def encode(message: Mapping[str, Any], arrays: Sequence[array[Any]] = ()) -> bytes:
    """A message as a frame, with `arrays` beside it.

    Raises: TypeError for a value that JSON does not know; ServiceError for a message that is too large.
    """
    shapes = [[numbers.typecode, len(numbers)] for numbers in arrays]
    text = json.dumps({**message, "arrays": shapes}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    numbers = b"".join(numbers.tobytes() for numbers in arrays)
    return pack(text, numbers)


def decode(text: bytes, numbers: bytes) -> Frame:
    """The message of a frame's two parts; `arrays` holds its arrays.

    Raises: ServiceError when it is no such message.
    """
    try:
        message = json.loads(text)
        if not isinstance(message, dict):
            raise TypeError(f"a {type(message).__name__}, no object")
        message["arrays"] = _arrays(message["arrays"], numbers)
    except (ValueError, TypeError, KeyError) as error:
        raise ServiceError(f"a frame that cannot be read: {error}") from error
    return message


def _arrays(shapes: Sequence[tuple[str, int]], numbers: bytes) -> list[array[Any]]:
    found = []
    start = 0
    for typecode, count in shapes:
        if typecode not in TYPECODES:
            raise ValueError(f"unknown typecode {typecode!r}")
        made: array[Any] = array(typecode)
        stop = start + count * made.itemsize
        if not start <= stop <= len(numbers):
            raise ValueError(f"{count} numbers at {start} of {len(numbers)} bytes")
        made.frombytes(numbers[start:stop])
        found.append(made)
        start = stop
    return found


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The next message; None when the other side is gone, in the middle of a frame or between two."""
    try:
        lengths = lengths_of(await reader.readexactly(HEADER.size))
        body = await reader.readexactly(sum(lengths))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return decode(body[: lengths[0]], body[lengths[0] :])


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message, waiting until it is gone."""
    connection.sendall(encode(message))


def receive(connection: socket.socket) -> Frame | None:
    """The next message, waiting for it; None when the other side is gone.

    Raises: TimeoutError when the socket's own time limit is up.
    """
    header = _exactly(connection, HEADER.size)
    if header is None:
        return None
    lengths = lengths_of(header)
    body = _exactly(connection, sum(lengths))
    return None if body is None else decode(body[: lengths[0]], body[lengths[0] :])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    pieces = bytearray()
    while len(pieces) < size:
        try:
            piece = connection.recv(min(1 << 20, size - len(pieces)))
        except ConnectionError:
            return None
        if not piece:
            return None
        pieces += piece
    return bytes(pieces)
