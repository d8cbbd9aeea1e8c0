"""Streams of bytes to agents, over a pair of asyncio streams.

Parts: `PlainTransport`, bytes as they are; `SealedTransport`, records that both ends authenticate. Docker's, which
carries two streams in one, is in `docker/stream.py`. Invariant: closing twice is harmless, and reading after it is the
end of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from mettle.sandbox.containers.agent.seal import NONCE_BYTES, Seal
from mettle.sandbox.machines.line import MachineLost

_READ_BYTES: Final = 1 << 18


class PlainTransport:
    """Bytes as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        return await self._reader.read(_READ_BYTES)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before it
            self._writer.close()


class SealedTransport(PlainTransport):
    """Records that carry a code only who knows the token can make."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> None:
        super().__init__(reader, writer)
        self._seal = Seal(token, is_owner=True)

    @classmethod
    async def connect(cls, host: str, port: int, token: bytes, timeout_s: float) -> SealedTransport:
        """A connection that has proved itself. Raises: OSError, also for whoever does not know the token."""
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            made = cls(reader, writer, token)
            try:
                await made._greet()
            except BaseException:
                made.close()
                raise
        return made

    async def read(self) -> bytes:
        while data := await super().read():
            if opened := self._seal.open(data):
                return opened
        return b""

    def write(self, data: bytes) -> None:
        super().write(self._seal.close(data))

    async def _greet(self) -> None:
        self._writer.write(self._seal.hello)
        try:
            self._seal.open(await self._reader.readexactly(NONCE_BYTES))
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the agent hung up") from error
        self.write(b"hello")
        await self.drain()


async def wait_ready(line_ready: asyncio.Future[dict[str, object]], timeout_s: float) -> dict[str, object]:
    """The agent's first message. Raises: MachineLost."""
    try:
        async with asyncio.timeout(timeout_s):
            header = await asyncio.shield(line_ready)
    except TimeoutError as error:
        raise MachineLost(f"the agent did not answer within {timeout_s:.0f} s") from error
    if header.get("ready") is not True:
        raise MachineLost("an agent's first message was not the expected one")
    return header
