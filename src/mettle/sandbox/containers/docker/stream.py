"""Process 1 of a container, attached to by `aiodocker`: standard output is its word, standard error its last words."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, Self

import aiohttp

from mettle.sandbox.containers.docker.client import DockerClient

if TYPE_CHECKING:
    from aiodocker.stream import Stream

_STDOUT: Final = 1
_STDERR: Final = 2
_MAX_WORDS_BYTES: Final = 4096


class AttachedStream:
    """Standard input and output of a process elsewhere, and what it last said on standard error."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._words = bytearray()
        self._unsent = bytearray()
        self._has_more = asyncio.Event()
        self._sender = asyncio.create_task(self._send(), name="docker attach")

    @classmethod
    async def attach(cls, client: DockerClient, container_id: str) -> Self:
        """Before it is started, so that nothing is missed. Raises: ControlPlaneError."""
        container = client.docker.containers.container(container_id)
        stream = container.attach(stdin=True, stdout=True, stderr=True)
        return cls(await client.ask("attach", stream.__aenter__))

    @property
    def last_words(self) -> str:
        return self._words.decode(errors="replace").strip()

    async def read(self) -> bytes:
        """What comes on standard output; empty at the end."""
        try:
            while (message := await self._stream.read_out()) is not None:
                if message.stream == _STDERR:
                    self._words += message.data
                    del self._words[:-_MAX_WORDS_BYTES]
                elif message.stream != _STDOUT:
                    raise ValueError(f"a piece of stream {message.stream}")
                elif message.data:
                    return message.data
        except aiohttp.ClientError as error:
            raise ConnectionResetError(str(error)) from error
        return b""

    def write(self, data: bytes) -> None:
        self._unsent += data
        self._has_more.set()

    async def close(self) -> None:
        self._sender.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sender
        await self._stream.close()

    async def _send(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, aiohttp.ClientError):  # the reader sees the end
            while await self._has_more.wait():
                self._has_more.clear()
                data, self._unsent = bytes(self._unsent), bytearray()
                await self._stream.write_in(data)
