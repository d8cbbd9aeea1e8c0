"""Where agents work: machines, and the proxy that they call.

Parts: `Place`. Both are made when first needed, one of each for an event loop. Invariants: nothing of the sandbox is
imported before the first agent starts; a loop that was closed takes its machines with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mettle.envs.proxy.server import ProxyServer

if TYPE_CHECKING:
    from mettle.sandbox import MachineConfig, MachinePool
    from mettle.sandbox.machines.files import Snapshot
    from mettle.sandbox.machines.machine import Machine


@dataclass
class _Here:
    """What one event loop has."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    proxy: ProxyServer | None = None
    pool: MachinePool | None = None


class Place:
    """A pool of machines and a proxy. `host_port` is where the proxy listens on this host, None for nowhere."""

    def __init__(self, backend: str, host_port: int | None) -> None:
        self._backend = backend
        self._host_port = host_port
        self._here: dict[asyncio.AbstractEventLoop, _Here] = {}

    async def proxy(self) -> ProxyServer:
        """The proxy."""
        here = self._of_this_loop()
        async with here.lock:
            if here.proxy is None:
                here.proxy = ProxyServer()
                if self._host_port is not None:
                    await here.proxy.listen(port=self._host_port)
        return here.proxy

    async def machine(self, config: MachineConfig, snapshot: Snapshot | None = None) -> Machine:
        """A new machine, which starts from `snapshot` where one is given."""
        from mettle.sandbox import MachinePool, SandboxConfig

        here = self._of_this_loop()
        async with here.lock:
            if here.pool is None:
                pool = MachinePool(SandboxConfig.model_validate({"backend": self._backend}))
                here.pool = await pool.__aenter__()
        return await here.pool.create(config, snapshot=snapshot)

    async def close(self) -> None:
        """Close what this loop has, and end what closed loops have left."""
        here = self._of_this_loop()
        del self._here[asyncio.get_running_loop()]
        if here.proxy is not None:
            await here.proxy.close()
        if here.pool is not None:
            await here.pool.close()

    def _of_this_loop(self) -> _Here:
        for loop in [loop for loop in self._here if loop.is_closed()]:
            _end(self._here.pop(loop))
        return self._here.setdefault(asyncio.get_running_loop(), _Here())


def _end(here: _Here) -> None:
    """End the machines of a loop that is closed, so that nobody can ask them to."""
    pid = here.pool.template_pid if here.pool is not None else None
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
