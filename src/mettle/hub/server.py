"""Serving the Hub: binds, says when it is ready, stops on a signal."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

import uvicorn

from mettle.errors import UserError
from mettle.evals.reader import find_evaluations
from mettle.hub.app import create_app
from mettle.hub.config import HubConfig
from mettle.hub.security import LOOPBACK_NAMES
from mettle.storage.files import write_json


def serve(config: HubConfig, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until a signal ends the process. `on_ready` is called with the address once requests are answered.

    Raises: UserError when the folder is missing or the port is taken.
    """
    if not config.runs.is_dir() and not find_evaluations(config.workspace):
        raise UserError(f"no folder {config.runs}, and no evaluations: name a folder of runs, or one run directory")
    listener = bind(config.host, config.port)
    allowed = LOOPBACK_NAMES | {config.host} if config.is_loopback else None
    settings = uvicorn.Config(
        create_app(config.runs, workspace=config.workspace, allowed_hosts=allowed),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
    )
    try:
        asyncio.run(_serve(_Server(settings, config, listener, on_ready), listener))
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: UserError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {host} is in use; give another with --port, or 0 for any free one"
            ) from error
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def base_url(host: str, port: int) -> str:
    """The address for a browser."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Writes the ready file once requests are answered."""

    def __init__(
        self,
        settings: uvicorn.Config,
        config: HubConfig,
        listener: socket.socket,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        super().__init__(settings)
        self._hub = config
        self._on_ready = on_ready
        self._port: int = listener.getsockname()[1]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._hub.ready_file is not None:
            address = {"base_url": base_url(self._hub.host, self._port), "host": self._hub.host, "port": self._port}
            write_json(self._hub.ready_file, {**address, "pid": os.getpid()})
        if self._on_ready is not None:
            self._on_ready(base_url(self._hub.host, self._port))


async def _serve(server: _Server, listener: socket.socket) -> None:
    await server.serve(sockets=[listener])
