"""Where agents work: machines, and the proxy that they call.

Parts: `Place`. Both are made when first needed, one of each for an event loop. Invariant: nothing of the sandbox is
imported before the first agent starts.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mettle.envs.proxy.server import ProxyServer

if TYPE_CHECKING:
    from mettle.sandbox import MachineConfig, MachinePool
    from mettle.sandbox.machines.machine import Machine


class Place:
    """A pool of machines and a proxy. `host_port` is where the proxy listens on this host, None for nowhere."""

    def __init__(self, backend: str, host_port: int | None) -> None:
        self._backend = backend
        self._host_port = host_port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._proxy: ProxyServer | None = None
        self._pool: MachinePool | None = None

    async def proxy(self) -> ProxyServer:
        """The proxy; it listens on a port of this host only if it was given one."""
        self._forget_other_loop()
        async with self._lock:
            if self._proxy is None:
                self._proxy = ProxyServer()
                if self._host_port is not None:
                    await self._proxy.listen(port=self._host_port)
        return self._proxy

    async def machine(self, config: MachineConfig) -> Machine:
        """A new machine."""
        from mettle.sandbox import MachinePool, SandboxConfig

        self._forget_other_loop()
        async with self._lock:
            if self._pool is None:
                pool = MachinePool(SandboxConfig.model_validate({"backend": self._backend}))
                self._pool = await pool.__aenter__()
        return await self._pool.create(config)

    async def close(self) -> None:
        """Close both."""
        self._forget_other_loop()
        proxy, self._proxy = self._proxy, None
        pool, self._pool = self._pool, None
        if proxy is not None:
            await proxy.close()
        if pool is not None:
            await pool.close()

    def _forget_other_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._lock, self._proxy, self._pool = loop, asyncio.Lock(), None, None
