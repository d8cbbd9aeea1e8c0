"""Ports of machines that others reach: each a port of this service's own address, until it or its machine is closed.

A connection there is one to 127.0.0.1:`port` inside. Nothing asks who connects, as with the ports that the field's
clients expose: whoever can reach the address can reach the program. Invariant: a machine that has ended has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass, field
from typing import Final

from mettle.errors import UserError
from mettle.sandbox.service.faults import NoMachine, QuotaExceeded
from mettle.sandbox.service.machines import MachineRecord

_MAX_OF_MACHINE: Final = 16
_MAX_CONNECTIONS: Final = 256
_PIECE_BYTES: Final = 1 << 16


@dataclass
class Exposure:
    """One port that is open to others."""

    id: str
    record: MachineRecord
    port: int
    name: str
    protocol: str
    server: asyncio.Server
    connections: set[asyncio.Task[None]] = field(default_factory=set)
    created: float = field(default_factory=time.time)

    @property
    def outer_port(self) -> int:
        return int(self.server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Take no more connections and cut those that there are."""
        self.server.close()
        for task in list(self.connections):
            task.cancel()


class Exposures:
    """All that are open, by their ids."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._open: dict[str, Exposure] = {}

    async def add(self, record: MachineRecord, port: int, name: str, protocol: str) -> Exposure:
        """Raises: UserError for no port or protocol, QuotaExceeded when the machine has as many as it may."""
        if not 1 <= port <= 65_535:
            raise UserError(f"there is no port {port}: ports go from 1 to 65535")
        if protocol not in ("HTTP", "TCP"):
            raise UserError(f"protocol is {protocol[:20]!r}; it must be HTTP or TCP")
        if len(self.of(record)) >= _MAX_OF_MACHINE:
            raise QuotaExceeded(f"machine {record.id} has {_MAX_OF_MACHINE} open ports already: close some")
        made: list[Exposure] = []
        server = await asyncio.start_server(
            lambda reader, writer: _begin(made[0], reader, writer), self._host or "127.0.0.1", 0
        )
        made.append(Exposure(secrets.token_hex(12), record, port, name[:100], protocol, server))
        self._open[made[0].id] = made[0]
        return made[0]

    def of(self, record: MachineRecord) -> list[Exposure]:
        """Those of a machine, the oldest first."""
        return [each for each in self._open.values() if each.record is record]

    async def remove(self, record: MachineRecord, exposure_id: str) -> None:
        """Raises: NoMachine when the machine has none of that id."""
        known = self._open.get(exposure_id)
        if known is None or known.record is not record:
            raise NoMachine(f"machine {record.id} has no open port {exposure_id[:40]!r}")
        del self._open[exposure_id]
        await known.close()

    async def sweep(self) -> None:
        """Close those of machines that have ended."""
        for each in [each for each in self._open.values() if each.record.ended is not None]:
            del self._open[each.id]
            await each.close()

    async def close(self) -> None:
        """Close all."""
        for each in list(self._open.values()):
            del self._open[each.id]
            await each.close()


async def _begin(exposure: Exposure, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    task = asyncio.current_task()
    if task is None or len(exposure.connections) >= _MAX_CONNECTIONS or exposure.record.ended is not None:
        writer.close()
        return
    exposure.connections.add(task)
    try:
        inside = await exposure.record.machine.connect(exposure.port)
        inner_reader, inner_writer = await asyncio.open_connection(sock=inside)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, inner_writer))
                group.create_task(_pump(inner_reader, writer))
        finally:
            inner_writer.close()
    except (OSError, ExceptionGroup, asyncio.CancelledError):
        pass  # nobody answers inside, or one of the two has gone; cancelled only by `Exposure.close`
    except Exception:
        if exposure.record.machine.is_alive:
            raise
    finally:
        exposure.connections.discard(task)
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the one side has said all; then the other hears that, and may go on itself."""
    while data := await reader.read(_PIECE_BYTES):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
