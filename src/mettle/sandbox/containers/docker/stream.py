"""The hijacked connection to a container's process 1: HTTP until the answer, bytes both ways after it.

What comes out carries a header of eight bytes before each piece: the stream (1 is standard output, 2 standard error),
three zeros, and the length. Standard output is the agent's line; standard error its last words.
Invariant: a head that is neither an upgrade nor an error the daemon explains is an error here; a piece of no known
stream ends the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from typing import TYPE_CHECKING, Final

from mettle.sandbox.containers.faults import ControlPlaneAway, ControlPlaneError

if TYPE_CHECKING:
    from mettle.sandbox.containers.docker.api import Address

_HEAD: Final = struct.Struct(">BxxxI")
_STDOUT: Final = 1
_STDERR: Final = 2
_READ_BYTES: Final = 1 << 18
_MAX_WORDS_BYTES: Final = 4096
_ATTACH_S: Final = 30.0
_SWITCHED: Final = (101, 200)


class DockerTransport:
    """Standard input and output of a process elsewhere, and what it last said on standard error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._stream = _STDOUT
        self._left = 0
        self._words = bytearray()

    @property
    def last_words(self) -> str:
        return self._words.decode(errors="replace").strip()

    async def read(self) -> bytes:
        while True:
            if self._left == 0 and not await self._read_head():
                return b""
            data = await self._reader.read(min(self._left, _READ_BYTES)) if self._left else b""
            if self._left and not data:
                return b""
            self._left -= len(data)
            if self._stream == _STDERR:
                self._words += data
                del self._words[:-_MAX_WORDS_BYTES]
            elif data:
                return data

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before it
            self._writer.close()

    async def _read_head(self) -> bool:
        try:
            head = await self._reader.readexactly(_HEAD.size)
        except asyncio.IncompleteReadError:
            return False
        self._stream, self._left = _HEAD.unpack(head)
        if self._stream > _STDERR:
            raise ValueError(f"a piece of stream {self._stream}")
        return True


async def attach(address: Address, path: str) -> DockerTransport:
    """Hijack a connection. Raises: ControlPlaneError."""
    try:
        async with asyncio.timeout(_ATTACH_S):
            reader, writer = await _connect(address)
            try:
                writer.write(_request(address, path))
                await _read_answer(reader)
            except BaseException:
                writer.close()
                raise
    except TimeoutError as error:
        raise ControlPlaneAway(f"the Docker daemon at {address.text} did not attach") from error
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ControlPlaneAway(f"the Docker daemon at {address.text} did not attach: {error}") from error
    return DockerTransport(reader, writer)


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.path:
        return await asyncio.open_unix_connection(address.path)
    return await asyncio.open_connection(address.host, address.port, ssl=address.tls)


def _request(address: Address, path: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {address.host}",
        "Connection: Upgrade",
        "Upgrade: tcp",
        "Content-Length: 0",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def _read_answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    words = first.split(" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    if status in _SWITCHED:
        return
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "")
    body = (
        await reader.readexactly(min(int(length), _READ_BYTES)) if length.isdigit() else await reader.read(_READ_BYTES)
    )
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, AttributeError):
        text = str(json.loads(text).get("message", text))
    raise ControlPlaneError(f"Docker: attach: {status}: {text.strip()[:500]}", status)
