"""HTTP/1.1 and websockets at the agent's end, as far as the clients of a sandbox service speak them.

Invariant: a head has a greatest length, and a body is read no further than it says; whatever a request is answered, the
next one on its connection begins where its body ended, or the connection ends.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import AsyncIterator
from typing import Any, Final, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

from mettle.sandbox.containers.agent.loop import LoopEvent
from mettle.sandbox.containers.agent.mux import Mux, MuxChannel

_MAX_HEAD_BYTES: Final = 1 << 16
_MAX_LINE_BYTES: Final = 1 << 10
_MAX_MESSAGE_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 16
_WEBSOCKET: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class PeerEnded(Exception):
    """The other end has hung up, or says what cannot be read."""


class HttpStream(MuxChannel):
    """One connection: what has come, and room for what is sent."""

    def __init__(self, mux: Mux, number: int, gate: LoopEvent) -> None:
        super().__init__(mux, number)
        self._gate = gate  # shut while the owner takes nothing at all
        self._is_writing = False
        self._free = LoopEvent()
        self._held = bytearray()
        self._news = LoopEvent()
        self._room = LoopEvent()
        self.on_hang_up: Any = lambda: None

    def on_data(self, data: bytes) -> None:
        self._held += data
        self._news.set()

    def on_credit(self) -> None:
        self._room.set()

    def on_end(self) -> None:
        self._news.set()

    def on_reset(self) -> None:
        self._room.set()
        self.on_hang_up()

    async def some(self, max_bytes: int = _READ_BYTES) -> bytes:
        """What there is, at least a byte; nothing at the end."""
        while not self._held:
            if self.has_all:
                return b""
            self._news.clear()
            await self._news.wait()
        data = bytes(self._held[:max_bytes])
        del self._held[:max_bytes]
        self.took(len(data))
        return data

    async def exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            data += await self.some(num_bytes - len(data)) or _hung_up()
        return bytes(data)

    async def until(self, mark: bytes, max_bytes: int) -> bytes:
        """Up to a mark, which is left out; nothing when the other end has hung up before the first byte."""
        while (at := self._held.find(mark)) < 0:
            if len(self._held) > max_bytes:
                raise PeerEnded("a head, or a line, is too long")
            if self.has_all:
                return b"" if not self._held else _hung_up()
            self._news.clear()
            await self._news.wait()
        data = bytes(self._held[:at])
        del self._held[: at + len(mark)]
        self.took(at + len(mark))
        return data

    async def write(self, data: bytes) -> None:
        """Send all of it in one piece, as the other end takes it."""
        while self._is_writing:
            self._free.clear()
            await self._free.wait()
        self._is_writing = True
        try:
            while data:
                await self._gate.wait()
                if self.has_sent_all:
                    _hung_up()
                data = data[self.send(data) :]
                if data:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._is_writing = False
            self._free.set()


def _hung_up() -> NoReturn:
    raise PeerEnded("the other end has hung up")


class Request:
    """One request, and the ways to answer it."""

    def __init__(self, stream: HttpStream, method: str, target: str, headers: dict[str, str]) -> None:
        parts = urlsplit(target)
        self.stream = stream
        self.method = method
        self.words = [unquote(word) for word in parts.path.strip("/").split("/")]
        self.query = parse_qs(parts.query, keep_blank_values=True)
        self.headers = headers
        self.has_answered = False
        self._body = self._pieces()

    @property
    def is_websocket(self) -> bool:
        return self.headers.get("upgrade", "").lower() == "websocket"

    def one(self, name: str, default: str) -> str:
        """One value of the query."""
        return self.query.get(name, [default])[-1]

    def body(self) -> AsyncIterator[bytes]:
        """The body as it comes. Once."""
        return self._body

    async def finish(self) -> None:
        """Read what nobody has read."""
        async for _ in self._body:
            pass

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while left := _number(await self.stream.until(b"\r\n", _MAX_LINE_BYTES), 16):
                async for piece in self._exactly(left):
                    yield piece
                await self.stream.until(b"\r\n", _MAX_LINE_BYTES)
            await self.stream.until(b"\r\n", _MAX_LINE_BYTES)
        else:
            async for piece in self._exactly(_number(self.headers.get("content-length", "0").encode(), 10)):
                yield piece

    async def _exactly(self, left: int) -> AsyncIterator[bytes]:
        while left:
            piece = await self.stream.some(min(left, _READ_BYTES)) or _hung_up()
            left -= len(piece)
            yield piece

    async def answer(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """A JSON answer."""
        data = json.dumps(body, separators=(",", ":")).encode()
        about = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        await self._head(status, about)
        await self.stream.write(data)

    async def begin(self, kind: str) -> None:
        """An answer whose length nobody knows yet; `send` its pieces, and at last nothing."""
        await self._head(200, {"Content-Type": kind, "Transfer-Encoding": "chunked"})

    async def send(self, data: bytes) -> None:
        await self.stream.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def upgrade(self) -> WebSocket:
        key = self.headers.get("sec-websocket-key", "").encode()
        accept = base64.b64encode(hashlib.sha1(key + _WEBSOCKET, usedforsecurity=False).digest()).decode()
        await self._head(101, {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accept})
        return WebSocket(self.stream)

    async def _head(self, status: int, headers: dict[str, str]) -> None:
        self.has_answered = True
        lines = [f"HTTP/1.1 {status} -", *(f"{name}: {value}" for name, value in headers.items())]
        await self.stream.write("\r\n".join([*lines, "", ""]).encode())


async def read_request(stream: HttpStream) -> Request | None:
    """The next request; None when no more come. Raises: PeerEnded."""
    head = await stream.until(b"\r\n\r\n", _MAX_HEAD_BYTES)
    if not head:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3:
        raise PeerEnded("no request begins like this")
    pairs = (line.partition(":") for line in lines)
    return Request(stream, words[0], words[1], {name.strip().lower(): value.strip() for name, _, value in pairs})


def _number(text: bytes, base: int) -> int:
    try:
        return int(text.partition(b";")[0], base)
    except ValueError:
        raise PeerEnded("a length that is none") from None


class WebSocket:
    """Messages both ways. What the client sends is masked, and each message is one frame."""

    def __init__(self, stream: HttpStream) -> None:
        self._stream = stream

    async def receive(self) -> tuple[int, bytes]:
        """The next message; `CLOSE` at the end, however that comes."""
        while True:
            first, length = await self._stream.exactly(2)
            kind, size = first & 15, length & 127
            if size > 125:
                text = await self._stream.exactly(2 if size == 126 else 8)
                size = int.from_bytes(text, "big")
            if size > _MAX_MESSAGE_BYTES or not first & 128:
                raise PeerEnded("a message that is too long, or in parts")
            mask = await self._stream.exactly(4) if length & 128 else bytes(4)
            data = _unmask(await self._stream.exactly(size), mask)
            if kind != PING:
                return kind, data
            await self.send(PONG, data)

    async def send(self, kind: int, data: bytes) -> None:
        size = len(data)
        if size < 126:
            head = struct.pack(">BB", 128 | kind, size)
        elif size < 1 << 16:
            head = struct.pack(">BBH", 128 | kind, 126, size)
        else:
            head = struct.pack(">BBQ", 128 | kind, 127, size)
        await self._stream.write(head + data)


def _unmask(data: bytes, mask: bytes) -> bytes:
    """Exclusive or with the mask, repeated; as one large number, which is fast."""
    if not any(mask):
        return data
    repeated = (mask * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(len(data), "big")
