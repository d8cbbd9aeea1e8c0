"""A service from its start to its end: pools, socket, signals, idle end.

Invariant: it listens only after its pools have been started and measured; told to end, it takes nothing new, lets
requests finish for `grace_s`, and leaves no machine. Ended by force, its machines end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from aiohttp import web

from mettle.errors import UserError
from mettle.sandbox.backends import find_backend
from mettle.sandbox.protocols import Judge
from mettle.sandbox.service.app import make_app
from mettle.sandbox.service.bodies import sweep_spools
from mettle.sandbox.service.certificates import tls_context
from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.leases import ClientLeases
from mettle.sandbox.service.machines import Register
from mettle.sandbox.service.metrics import ServiceMetrics
from mettle.sandbox.service.quotas import Quotas
from mettle.sandbox.service.state import SandboxService
from mettle.sandbox.service.tokens import TOKEN_ENV, Tokens

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.25
_SHUTDOWN_S: Final = 2.0


@contextlib.asynccontextmanager
async def started_service(config: ServiceConfig) -> AsyncIterator[SandboxService]:
    """The pools of a service, and everything that it counts with."""
    tokens = Tokens(config.quota, config.tokens_file, os.environ.get(TOKEN_ENV))
    if config.unix is None and tokens.is_empty:
        raise UserError(
            f"a sandbox service on {config.host} needs a token: make one with `mettle sandbox token NAME`, "
            f"or set {TOKEN_ENV}"
        )
    await asyncio.to_thread(sweep_spools, config.spool_dir)
    backend = find_backend(config.sandbox.backend)
    try:
        judge: Judge | None = backend.judge(config.sandbox)
    except UserError as error:
        logger.warning("this service judges nothing: %s", error)
        judge = None
    quotas, metrics = Quotas(), ServiceMetrics()
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(backend.machines(config.sandbox))
        if judge is not None:
            await stack.enter_async_context(judge)
        register = Register(pool, quotas, metrics)
        service = SandboxService(config, tokens, register, judge, quotas, metrics, ClientLeases(config.lease_s))
        try:
            yield service
        finally:
            service.idempotent.close()
            await register.close()


@contextlib.asynccontextmanager
async def listening(config: ServiceConfig) -> AsyncIterator[tuple[SandboxService, str]]:
    """A service that answers, and its URL."""
    context = tls_context(config.tls_cert, config.tls_key) if config.tls_cert is not None else None
    async with started_service(config) as service:
        runner = web.AppRunner(
            make_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
        )
        await runner.setup()
        service.idle_connections.connections = lambda: runner.server.connections if runner.server is not None else []
        try:
            yield service, await _bind(runner, config, context)
            service.is_closing = True
            await _drain(service)
        finally:
            service.is_closing = True
            await runner.cleanup()
            if config.unix is not None:
                config.unix.unlink(missing_ok=True)


async def serve(config: ServiceConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM, SIGINT, or until it has been idle for `idle_exit_s`."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    try:
        async with listening(config) as (service, url):
            on_ready(url)
            while not over.is_set() and not _is_idle(service):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S if config.idle_exit_s else None):
                        await over.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _is_idle(service: SandboxService) -> bool:
    after_s = service.config.idle_exit_s
    if after_s is None or service.num_open or service.register.num_running:
        return False
    return time.monotonic() - service.last_used > after_s


async def _bind(runner: web.AppRunner, config: ServiceConfig, context: ssl.SSLContext | None) -> str:
    if config.unix is not None:
        await web.SockSite(runner, _unix_socket(config.unix)).start()
        return f"unix:{config.unix}"
    site = web.TCPSite(runner, config.host, config.port, ssl_context=context)
    try:
        await site.start()
    except OSError as error:
        raise UserError(f"cannot listen on {config.host}:{config.port}: {_why_not(error)}") from error
    port = int(runner.addresses[0][1])
    shown = f"[{config.host}]" if ":" in config.host else config.host
    return f"http{'s' if context else ''}://{shown}:{port}"


def _why_not(error: OSError) -> str:
    """The reason alone; what asyncio says repeats the address."""
    is_of_name = isinstance(error, socket.gaierror)
    return "there is no such host" if is_of_name else os.strerror(error.errno).lower() if error.errno else str(error)


def _unix_socket(path: Path) -> socket.socket:
    """A listening socket that no other user can open, from its first moment on."""
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise UserError(f"cannot listen on {path}: {error.strerror or error}") from error
    finally:
        os.umask(before)
    return bound


async def _drain(service: SandboxService) -> None:
    deadline = time.monotonic() + service.config.grace_s
    while service.num_open and time.monotonic() < deadline:  # noqa: ASYNC110 - a counter, looked at once, at the end
        await asyncio.sleep(0.05)


def main(arguments: list[str]) -> int:
    """`python -m mettle.sandbox.service CONFIG_JSON`: serve, and say on standard output where."""
    config = ServiceConfig.model_validate(json.loads(arguments[0]))
    try:
        asyncio.run(serve(config, lambda url: print(json.dumps({"url": url}), flush=True)))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0
