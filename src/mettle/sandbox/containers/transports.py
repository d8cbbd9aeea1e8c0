"""Channels of a mux as transports of this process's event loop, and what makes aiohttp use them.

Invariant: what a protocol does not take waits within its channel's window; a transport that is lost says so once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler

from mettle.sandbox.containers.agent.mux import Mux, MuxChannel

_HIGH_BYTES: Final = 1 << 18


class ChannelTransport(MuxChannel, asyncio.Transport):
    """One connection to an agent."""

    def __init__(self, mux: Mux, number: int, protocol: asyncio.Protocol) -> None:
        MuxChannel.__init__(self, mux, number)
        asyncio.Transport.__init__(self)
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._unsent = bytearray()
        self._held: list[bytes] = []
        self._is_paused = self._is_full = self._is_closing = self._is_lost = False
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        if not self._unsent:
            data = bytes(data)
            data = data[self.send(data) :]
        self._unsent += data
        if len(self._unsent) > _HIGH_BYTES and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()

    def on_credit(self) -> None:
        del self._unsent[: self.send(bytes(self._unsent[: self.credit]))]
        if self._is_full and len(self._unsent) <= _HIGH_BYTES // 2:
            self._is_full = False
            self._protocol.resume_writing()
        if self._is_closing and not self._unsent:
            self.abort()

    def on_data(self, data: bytes) -> None:
        if self._is_paused:
            self._held.append(data)
        elif not self._is_closing:
            self._protocol.data_received(data)
            self.took(len(data))

    def on_end(self) -> None:
        if not self._held and not self._protocol.eof_received():
            self.close()

    def on_reset(self) -> None:
        self.lose(ConnectionResetError("the agent has hung up"))

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        while self._held and not self._is_paused:
            self.on_data(self._held.pop(0))
        if self.has_all and not self._held and not self._is_paused:
            self.on_end()

    def is_reading(self) -> bool:
        return not self._is_paused

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Send what is left, then hang up."""
        self._is_closing = True
        if not self._unsent:
            self.abort()

    def abort(self) -> None:
        self.reset()
        self.lose(None)

    def lose(self, error: Exception | None) -> None:
        """It has ended, without a word to the other end."""
        self._is_closing = True
        if not self._is_lost:
            self._is_lost = True
            self._loop.call_soon(self._protocol.connection_lost, error)

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The window is the limit."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol), "a stream needs a protocol of streams"
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class ChannelConnector(aiohttp.BaseConnector):
    """Opens connections as channels: what `UnixConnector` is for a socket."""

    def __init__(self, connect: Callable[[asyncio.Protocol], None]) -> None:
        super().__init__(limit=0, keepalive_timeout=3600.0)
        self._connect_channel = connect

    async def _create_connection(self, *_: object) -> ResponseHandler:
        protocol = self._factory()
        self._connect_channel(protocol)
        return protocol
