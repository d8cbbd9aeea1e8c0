"""Connections between simulated processes: what sockets do, on a virtual clock.

Parts: `SimulatedNetwork` (who listens, and who is connected), `ConnectionEnd` (a transport), `SimulatedListener`. What
speaks over them are the real protocols of clients and servers. Invariants: bytes reach a process in its own context, so
that one that is stopped takes none until it goes on; one that is killed hangs up on everybody; of one whose node is
lost nobody hears anything any more.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

Factory = Callable[[], asyncio.BaseProtocol]


class SimulatedNetwork:
    """The connections of a machine and of the nodes of its cluster."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._listeners: dict[int, tuple[Factory, contextvars.Context]] = {}
        self._ends: dict[int, list[ConnectionEnd]] = {}
        self._is_silent: dict[int, bool] = {}
        """Of processes that have ended: whether nobody was told."""
        self.names: dict[str, int] = {}
        """Who is reached by a name, and not by its pid."""

    def find(self, address: str) -> int:
        """The pid behind an address. Raises: OSError for a name that nobody has."""
        if address.isdecimal():
            return int(address)
        if address not in self.names:
            raise ConnectionRefusedError(111, f"nobody is {address}")
        return self.names[address]

    def listen(self, pid: int, factory: Factory) -> SimulatedListener:
        """Take connections for a process. Each has a protocol of its own, in the context of who listens."""
        self._listeners[pid] = factory, contextvars.copy_context()
        return SimulatedListener(lambda: self._listeners.pop(pid, None))

    async def connect(self, pid: int, to: int, factory: Factory) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect one process with another, which may be stopped: its kernel takes the connection.

        Raises: OSError where nobody listens. Waits for ever where the other's node is lost.
        """
        if pid in self._is_silent:
            raise ConnectionResetError("whoever asks is gone")
        if self._is_silent.get(to):
            await self._loop.create_future()
        if to not in self._listeners:
            raise ConnectionRefusedError(111, "Connection refused")
        make, context = self._listeners[to]
        ours, theirs = factory(), context.copy().run(make)
        near = ConnectionEnd(self._loop, ours, contextvars.copy_context())
        far = ConnectionEnd(self._loop, theirs, context.copy())
        near.peer, far.peer = far, near
        for owner, end in ((pid, near), (to, far)):
            self._ends[owner] = [one for one in self._ends.get(owner, ()) if not one.is_closing()] + [end]
        far.begin()
        ours.connection_made(near)
        return near, ours

    def end(self, pid: int, *, is_silent: bool) -> None:
        """A process is gone. Its node, if that is lost (`is_silent`), tells nobody."""
        self._listeners.pop(pid, None)
        self._is_silent[pid] = is_silent
        for end in self._ends.pop(pid, ()):
            end.drop(is_silent=is_silent)


class SimulatedListener:
    """What `create_server` gives."""

    sockets = ()

    def __init__(self, on_close: Callable[[], object]) -> None:
        self.close = on_close
        """Take no more connections."""


class ConnectionEnd(asyncio.Transport):
    """One end of a connection."""

    peer: ConnectionEnd

    def __init__(
        self, loop: asyncio.AbstractEventLoop, protocol: asyncio.BaseProtocol, context: contextvars.Context
    ) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self._context = context
        self._is_closing = self._is_dropped = self._is_paused = False
        self._held: list[bytes] = []

    def begin(self) -> None:
        """Tell the protocol of its connection, when its process runs."""
        self._soon(self._protocol.connection_made, self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not (self._is_closing or self._is_dropped or self.peer._is_dropped):
            self.peer._soon(self.peer._take, bytes(data))

    def is_closing(self) -> bool:
        return self._is_closing or self._is_dropped

    def close(self) -> None:
        """Hang up, on both sides."""
        if self.is_closing():
            return
        self._is_closing = True
        self._soon(self._protocol.connection_lost, None)
        if not self.peer._is_dropped:
            self.peer._soon(self.peer._hung_up)

    def abort(self) -> None:
        self.close()

    def drop(self, *, is_silent: bool) -> None:
        """Its process is gone."""
        if not (is_silent or self.is_closing()):
            self.peer._soon(self.peer._hung_up)
        self._is_dropped = True

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        held, self._held = self._held, []
        for data in held:
            self._soon(self._take, data)

    def is_reading(self) -> bool:
        return not (self._is_paused or self.is_closing())

    def get_write_buffer_size(self) -> int:
        return 0

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def _soon(self, call: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon(call, *arguments, context=self._context)

    def _take(self, data: bytes) -> None:
        if self._is_paused:
            self._held.append(data)
        elif not self.is_closing():
            assert isinstance(self._protocol, asyncio.Protocol)
            self._protocol.data_received(data)

    def _hung_up(self) -> None:
        if not self.is_closing():
            self._is_closing = True
            self._protocol.connection_lost(None)
