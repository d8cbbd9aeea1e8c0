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
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from mettle.errors import UserError
from mettle.processes.host import total_memory_mb, usable_cores
from mettle.sandbox.backends import find_backend
from mettle.sandbox.protocols import Backend, Judge
from mettle.sandbox.service.app import make_app, sweeping
from mettle.sandbox.service.certificates import tls_context
from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.leases import ClientLeases
from mettle.sandbox.service.machines import Register
from mettle.sandbox.service.metrics import ServiceMetrics
from mettle.sandbox.service.quotas import Quotas
from mettle.sandbox.service.state import SandboxService
from mettle.sandbox.service.tokens import TOKEN_ENV, TokenBook, Tokens
from mettle.sandbox.service.uploads import sweep_spools
from mettle.web.server import HttpServer, bind, bind_unix, url_of

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.25
_ON_THIS_HOST: Final = ("zygote", "unsafe")
"""Backends whose machines live in the memory of this host."""
_UNKNOWN_MEMORY_MB: Final = 256 << 10
_UNKNOWN_CPUS: Final = 4096.0
"""What a token may have together where machines live elsewhere, and that place does its own admission."""


@contextlib.asynccontextmanager
async def started_service(
    config: ServiceConfig,
    tokens: TokenBook | None = None,
    *,
    backend: Backend | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[SandboxService]:
    """The pools of a service, and everything that it counts with.

    `tokens` in place of those of its file; `backend` in place of the config's, of machines that are not of this host.
    """
    is_here = backend is None and config.sandbox.backend in _ON_THIS_HOST
    memory_mb = total_memory_mb() if is_here else None
    max_cpus = usable_cores() * config.cpus_per_core if is_here else None
    quota = config.quota.filled(memory_mb or _UNKNOWN_MEMORY_MB, max_cpus or _UNKNOWN_CPUS)
    config = config.model_copy(update={"quota": quota})
    tokens = tokens or _own_tokens(config)
    await asyncio.to_thread(sweep_spools, config.spool_dir)
    backend = backend or find_backend(config.sandbox.backend)
    try:
        judge: Judge | None = backend.judge(config.sandbox)
    except UserError as error:
        logger.warning("this service judges nothing: %s", error)
        judge = None
    quotas, metrics = Quotas(clock, uncapped_cpus=config.uncapped_cpus), ServiceMetrics()
    leases = ClientLeases(config.lease_s, clock)
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(backend.machines(config.sandbox))
        if judge is not None:
            await stack.enter_async_context(judge)
        register = Register(pool, quotas, metrics, config.spare_memory_mb if is_here else None, max_cpus)
        service = SandboxService(config, tokens, register, judge, quotas, metrics, leases)
        try:
            yield service
        finally:
            service.idempotent.close()
            service.long_bodies.close()
            await service.exposures.close()
            await register.close()


def _own_tokens(config: ServiceConfig) -> Tokens:
    tokens = Tokens(config.quota, config.tokens_file, os.environ.get(TOKEN_ENV))
    if config.unix is None and tokens.is_empty:
        raise UserError(
            f"a sandbox service on {config.host} needs a token: make one with `mettle sandbox token NAME`, "
            f"or set {TOKEN_ENV}"
        )
    return tokens


@contextlib.asynccontextmanager
async def listening(config: ServiceConfig) -> AsyncIterator[tuple[SandboxService, str]]:
    """A service that answers, and its URL."""
    context = tls_context(config.tls_cert, config.tls_key) if config.tls_cert is not None else None
    async with started_service(config) as service, sweeping(service):
        listener = bind_unix(config.unix) if config.unix is not None else bind(config.host, config.port)
        server = HttpServer(make_app(service), listener, tls=context, has_websockets=True)
        await server.start()
        try:
            yield service, _url(config, listener)
            service.is_closing = True
            await _drain(service)
        finally:
            service.is_closing = True
            await server.stop()
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


def _url(config: ServiceConfig, listener: socket.socket) -> str:
    if config.unix is not None:
        return f"unix:{config.unix}"
    return url_of(config.host, int(listener.getsockname()[1]), "https" if config.tls_cert is not None else "http")


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
