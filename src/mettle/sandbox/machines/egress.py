"""The one way out of a machine: an HTTP proxy that the owner answers on a socket inside it, for listed hosts only.

`CONNECT host:port` opens a tunnel (https, and anything else that speaks it); a request with a whole URL is forwarded as
one request with one answer. Names are resolved here, by the owner, and the address that was checked is the one that is
connected to, so that a name that changes its mind gains nothing. Parts: `Egress`; `machines/http_heads.py` reads what
the machine sends.
Invariant: no byte leaves before its destination is allowed; what the machine sends is untrusted to the last byte; a
connection counts until its socket is closed, so that a machine which reads nothing holds no more of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections import deque
from dataclasses import dataclass
from typing import Final

from mettle.sandbox.machines.http_heads import BadHead, Head, read_head
from mettle.sandbox.machines.network import Address, Network

logger = logging.getLogger(__name__)

PORT: Final = 3128
_MAX_CONNECTIONS: Final = 64
_MAX_REMEMBERED: Final = 100
_COPY_BYTES: Final = 1 << 16
_HEAD_S: Final = 30.0
_CONNECT_S: Final = 15.0
_IDLE_S: Final = 300.0
_LINGER_S: Final = 5.0


def proxy_environment() -> dict[str, str]:
    """The variables by which programs find the proxy."""
    url = f"http://127.0.0.1:{PORT}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {**dict.fromkeys(names, url), **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1")}


@dataclass(frozen=True, slots=True)
class EgressRefusal:
    """A destination that a machine asked for and did not get."""

    host: str
    port: int
    why: str


class Forbidden(Exception):
    """The destination is not allowed."""


class Egress:
    """Answers on the listening socket of one machine until it is closed."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.refusals: deque[EgressRefusal] = deque(maxlen=_MAX_REMEMBERED)
        """The last destinations that were refused."""
        self.num_bytes_out = 0
        self.num_bytes_in = 0

    async def open(self, listener: socket.socket) -> None:
        """Begin to answer on a socket that listens inside the machine, and that is closed with this."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_COPY_BYTES)

    def close(self) -> None:
        """End every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._connections:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is answered in a task"
        self._connections.add(task)
        try:
            if len(self._connections) > _MAX_CONNECTIONS:
                await _refuse(writer, 503, f"more than {_MAX_CONNECTIONS} connections at a time")
            else:
                await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # either side has gone, or says nothing more
        except asyncio.CancelledError:
            if self._server is not None:
                raise
        finally:
            await _hang_up(writer)
            self._connections.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_S):
                head = await read_head(reader)
        except BadHead as error:
            return await _refuse(writer, error.status, str(error))
        try:
            upstream = await self._connect(head)
        except Forbidden as error:
            return await _refuse(writer, 403, str(error))
        except (OSError, TimeoutError) as error:
            return await _refuse(writer, 502, f"{head.host}:{head.port} cannot be reached: {error or 'no answer'}")
        try:
            await self._relay(head, reader, writer, *upstream)
        finally:
            await _hang_up(upstream[1])

    async def _connect(self, head: Head) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to an allowed address of an allowed host. Raises: Forbidden, OSError."""
        why = self._network.why_host_refused(head.host, head.port)
        if why is not None:
            raise self._forbid(head, why)
        async with asyncio.timeout(_CONNECT_S):
            addresses = await _resolve(head.host, head.port)
            reasons = [self._why_refused(address, head.port) for address in addresses]
            allowed = [str(address) for address, why in zip(addresses, reasons, strict=True) if why is None]
            if not allowed:
                raise self._forbid(head, next((why for why in reasons if why), f"{head.host} has no address"))
            return await _connect_to_first(allowed, head.port)

    def _why_refused(self, address: Address, port: int) -> str | None:
        why = self._network.why_address_refused(address, port)
        if why is None and not self._network.lists(address, port) and _is_own(address, port):
            return f"{address} is this host's own address, and network.allow does not list it"
        return why

    def _forbid(self, head: Head, why: str) -> Forbidden:
        self.refusals.append(EgressRefusal(head.host, head.port, why))
        logger.info("a machine was refused a destination", extra={"host": head.host, "port": head.port, "why": why})
        return Forbidden(why)

    async def _relay(
        self,
        head: Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
    ) -> None:
        """Both ways until both are at their end; a forwarded request sends its own body and nothing more."""
        if head.is_tunnel:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            upstream.write(head.forwarded())
            self.num_bytes_out += len(head.forwarded())
        out = self._copy(reader, upstream, None if head.is_tunnel else head.body_bytes, is_out=True)
        back = self._copy(answers, writer, None, is_out=False)
        sending, receiving = asyncio.ensure_future(out), asyncio.ensure_future(back)
        try:
            await receiving
            if head.is_tunnel:
                await sending
        finally:
            for copying in (sending, receiving):
                copying.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError, TimeoutError):
                    await copying

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_bytes: int | None, *, is_out: bool
    ) -> None:
        """`num_bytes`, or all there is; then tell the other side that nothing more is coming."""
        while num_bytes is None or num_bytes > 0:
            async with asyncio.timeout(_IDLE_S):
                data = await reader.read(_COPY_BYTES if num_bytes is None else min(_COPY_BYTES, num_bytes))
            if not data:
                break
            writer.write(data)
            async with asyncio.timeout(_IDLE_S):
                await writer.drain()
            if num_bytes is not None:
                num_bytes -= len(data)
            if is_out:
                self.num_bytes_out += len(data)
            else:
                self.num_bytes_in += len(data)
        if num_bytes is None and writer.can_write_eof():
            writer.write_eof()


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close it once what was written has gone; one that takes nothing for a while is cut off."""
    writer.close()
    try:
        async with asyncio.timeout(_LINGER_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        pass  # it was cut off by the other side, or is now by this one
    finally:
        writer.transport.abort()


def _is_own(address: Address, port: int) -> bool:
    """Whether the way to an address ends on this host: then it is also where packets to it come from."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((str(address), port))  # sends nothing
            return ipaddress.ip_address(asking.getsockname()[0]) == address
    except OSError:
        return False  # there is no way to it at all


async def _resolve(host: str, port: int) -> list[Address]:
    with contextlib.suppress(ValueError):
        return [ipaddress.ip_address(host)]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    texts = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)
    return [ipaddress.ip_address(text) for text in texts]


async def _connect_to_first(addresses: list[str], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """By address, so that nothing is looked up a second time."""
    errors: list[OSError] = []
    for address in addresses:
        try:
            return await asyncio.open_connection(address, port, limit=_COPY_BYTES)
        except OSError as error:
            errors.append(error)
    raise errors[0]


async def _refuse(writer: asyncio.StreamWriter, status: int, why: str) -> None:
    names = {400: "Bad Request", 403: "Forbidden", 411: "Length Required", 431: "Too Large", 502: "Bad Gateway"}
    body = f"mettle: {why}\n".encode(errors="replace")
    head = (
        f"HTTP/1.1 {status} {names.get(status, 'Unavailable')}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
