"""The command session of the `prime` clients since 0.3: Connect streams of protobuf messages, read and written here.

Envelope: a byte of flags, the length in four bytes (big endian), then a message; the last one has flag 2 and holds
JSON, empty or with the error. Of the messages only the fields that are used have a name:

    StartRequest  { Command command = 1; bool stdin = 4; string session_uuid = 5; }
    Command       { string cmd = 1; repeated string args = 2; map<string, string> envs = 3; string cwd = 4; }
    StartResponse { Event event = 1; }
    Event         { Start start = 1 { uint32 pid = 1; }  Data data = 2 { bytes stdout = 1; bytes stderr = 2; }
                    End end = 3 { sint32 exit_code = 1; bool exited = 2; string status = 3; }  KeepAlive = 4 {} }
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from mettle.errors import UserError

CONTENT_TYPE: Final = "application/connect+proto"
_LAST: Final = 2
_COMPRESSED: Final = 1
_HEAD: Final = struct.Struct(">BI")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A command to start. `argv` is never empty."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = ""


def read_start(body: bytes) -> StartRequest:
    """The one envelope of a request. Raises: UserError when it is none, or names no command."""
    if len(body) < _HEAD.size:
        raise UserError("the body is no Connect envelope: it has fewer than five bytes")
    flags, length = _HEAD.unpack_from(body)
    if flags & _COMPRESSED:
        raise UserError("compressed messages are not taken here: send them as they are")
    message = body[_HEAD.size : _HEAD.size + length]
    if len(message) != length:
        raise UserError(f"the envelope says {length} bytes, and {len(message)} came")
    command = next((value for number, value in _fields(message) if number == 1), None)
    if not isinstance(command, bytes):
        raise UserError("the message has no command")
    words: dict[int, list[str]] = {1: [], 2: [], 4: []}
    env: dict[str, str] = {}
    for number, value in _fields(command):
        if number in words and isinstance(value, bytes):
            words[number].append(_text(value))
        elif number == 3 and isinstance(value, bytes):
            pair = {key: _text(each) for key, each in _fields(value) if isinstance(each, bytes)}
            env[pair.get(1, "")] = pair.get(2, "")
    if not words[1] or not words[1][-1]:
        raise UserError("the command has no cmd")
    return StartRequest((words[1][-1], *words[2]), env, words[4][-1] if words[4] else "")


def started(pid: int) -> bytes:
    """The envelope of a start."""
    return _event(1, _key(1, _VARINT) + _varint(pid))


def output(stream: str, data: bytes) -> bytes:
    """The envelope of a piece of stdout or stderr."""
    return _event(2, _field(1 if stream == "stdout" else 2, data))


def ended(exit_code: int) -> bytes:
    """The envelope of a result."""
    zigzag = (exit_code << 1) ^ (exit_code >> 63)
    said = f"exit status {exit_code}".encode()
    return _event(3, _key(1, _VARINT) + _varint(zigzag) + _key(2, _VARINT) + b"\x01" + _field(3, said))


def keep_alive() -> bytes:
    return _event(4, b"")


def last(code: str = "", message: str = "") -> bytes:
    """The envelope that ends a stream, with an error where there is one."""
    told = {"error": {"code": code, "message": message}} if code else {}
    return _envelope(json.dumps(told).encode(), _LAST)


def _envelope(message: bytes, flags: int = 0) -> bytes:
    return _HEAD.pack(flags, len(message)) + message


def _event(number: int, message: bytes) -> bytes:
    return _envelope(_field(1, _field(number, message)))


def _field(number: int, data: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(data)) + data


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field. Raises: UserError for what is no message."""
    place = 0
    while place < len(message):
        key, place = _read_varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _read_varint(message, place)
            yield number, value
            continue
        if kind == _BYTES:
            length, place = _read_varint(message, place)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise UserError(f"the message cannot be read: field {number} has wire type {kind}")
        if place + length > len(message):
            raise UserError("the message cannot be read: it is cut off")
        yield number, message[place : place + length]
        place += length


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise UserError("the message cannot be read: a number in it has no end")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
