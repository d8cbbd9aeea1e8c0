"""A socket, and an application that answers on it inside an event loop that runs already.

Parts: `bind`, `bind_unix`, `url_of`; `HttpServer` (uvicorn, told when to begin and when to end); `on_signals`. What
uvicorn leaves open is limited here: the length of a request's head, connections on which nothing is asked, and handlers
whose client has gone. Invariant: after `stop` there is no connection and no handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mettle.errors import UserError
from mettle.web.app import CONNECTION

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 64 << 10
KEEP_ALIVE_S: Final = 75
"""Clients of this package let go of an idle connection before."""
_MAX_IDLE: Final = 4096
_SWEEP_S: Final = 1.0
_CANCELLED_S: Final = 1.0
_CONNECT_S: Final = 1.0


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises: UserError when the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {host} is in use; give another with --port, or 0 for any free one"
            ) from error
        reason = "there is no such host" if isinstance(error, socket.gaierror) else error.strerror or str(error)
        raise UserError(f"cannot listen on {host}:{port}: {reason}; choose another port, or 0 for any") from error
    listener.setblocking(False)
    return listener


def bind_unix(path: Path) -> socket.socket:
    """A listening socket that no other user can open, from its first moment on.

    One that a server left behind is replaced. Raises: UserError, also when somebody listens there or it is a file.
    """
    _make_way(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen on {path}: {error.strerror or error}") from error
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener


def _make_way(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UserError(f"cannot listen on {path}: it is no socket; give another path, or remove it")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
            visitor.settimeout(_CONNECT_S)
            visitor.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot listen on {path}: {error.strerror or error}") from error
    else:
        raise UserError(f"cannot listen on {path}: another process does; give another path, or stop it")


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """The address for a client."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextlib.contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """While it is open, SIGTERM and SIGINT call `stop` in this event loop, and do nothing else."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class HttpServer:
    """Answers with `app` on one listening socket, which it closes in the end."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        tls: ssl.SSLContext | None = None,
        has_websockets: bool = False,
        keep_alive_s: int = KEEP_ALIVE_S,
        max_idle: int | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="websockets-sansio" if has_websockets else "none",
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
        )
        config.load()
        config.ssl = tls
        if listener.family != socket.AF_UNIX:
            # Its connections inherit this. asyncio does it for sockets that name TCP and for no other, and Nagle's
            # algorithm costs 40 ms for each answer in two writes.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listener = listener
        self._server = _Uvicorn(config, max_idle or _half_of_what_may_be_open())
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer requests from now on."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http server")
        started = asyncio.create_task(self._server.is_started.wait())
        await asyncio.wait({self._serving, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._serving.done():
            self._serving.result()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more connections, give requests `grace_s` to be answered, then cancel them and hang up."""
        if self._serving is None:
            self._listener.close()
            return
        self._server.grace_s = grace_s
        self._server.is_over.set()
        await self._serving

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without its signals and its ten wake-ups a second, and with an end that waits for nobody."""

    def __init__(self, config: uvicorn.Config, max_idle: int) -> None:
        super().__init__(config)
        self.is_started, self.is_over = asyncio.Event(), asyncio.Event()
        self.grace_s = 0.0
        self._max_idle = max_idle

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        self.is_started.set()
        while not self.is_over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_S):
                    await self.is_over.wait()
            self._sweep()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks and self.grace_s > 0:
            await asyncio.wait(state.tasks, timeout=self.grace_s)
        for task in list(state.tasks):
            task.cancel()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=_CANCELLED_S)
        for connection in list(state.connections):
            connection.transport.close()
        await asyncio.sleep(0)
        for connection in list(state.connections):  # its client does not read what was written
            connection.transport.abort()

    def _sweep(self) -> None:
        """Hang up on connections that ask nothing, or stop in the middle of it, for too long; and on too many."""
        old = asyncio.get_running_loop().time() - self.config.timeout_keep_alive
        connections = [one for one in self.server_state.connections if isinstance(one, _Connection)]
        idle = sorted((one for one in connections if one.is_idle), key=lambda one: one.idle_since)
        for place, one in enumerate(idle):
            if one.idle_since < old or len(idle) - place > self._max_idle:
                one.transport.abort()
        for one in connections:
            if one.is_in_body and one.heard_at < old and not one.flow.read_paused:
                one.transport.abort()


class _JoinedWrites:
    """A transport that sends the head of an answer together with what follows it at once: one system call for two.

    That call is the largest item of a short answer. Where nothing follows in this turn of the event loop, the head goes
    alone.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._head = b""
        self.is_closing = transport.is_closing
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading

    def write(self, data: bytes) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif data.startswith(b"HTTP/1."):
            self._head = data
            self._call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Connection(HttpToolsProtocol):
    """uvicorn's connection, with a limit for heads. It knows the task that answers, and cancels it when it is lost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = logger
        self.task: asyncio.Task[Any] | None = None
        self.is_gone = False
        self.idle_since = self.heard_at = self.loop.time()
        self._is_in_head = True
        self._num_head_bytes = 0

    @property
    def is_idle(self) -> bool:
        """True while no request is being answered; one whose head is not complete does not count."""
        return self.cycle is None or (self.cycle.response_complete and not self.flow.write_paused)

    @property
    def is_in_body(self) -> bool:
        """True while a request's body is still to come."""
        return self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete

    async def drain(self) -> None:
        """Wait until the client has taken most of what was written, or has gone."""
        if self.flow.write_paused:
            await self.flow.drain()

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_JoinedWrites(transport))  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone = True
        super().connection_lost(exc)
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self.loop.time()
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            raise ValueError("the head of the request is too long")  # which the parser makes a 400 of
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.flow.resume_reading()  # uvicorn pauses for a long body, and then does not see its client go


def _half_of_what_may_be_open() -> int:
    """Requests, uploads and machines need descriptors, too."""
    return min(_MAX_IDLE, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
