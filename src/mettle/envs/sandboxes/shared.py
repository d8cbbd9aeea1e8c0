"""The machines of this process, on an event loop of their own, so that clients of any thread and loop can use them.

Parts: `SandboxPools`, `SharedMachines`, `shared_machines` (those of this process), `configure`. A pool is started for
each set of Python packages when it is first asked for (0.1 s). Invariant: machines end with the process, however that
ends; a fork starts afresh.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mettle.processes.loop_thread import LoopThread

if TYPE_CHECKING:
    from mettle.sandbox import MachineConfig, SandboxConfig
    from mettle.sandbox.protocols import Machine, Machines

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CLOSE_S: Final = 10.0
SANDBOX_ENV: Final = "METTLE_SANDBOX"
"""The environment variable in which a run says what its environments' sandboxes run on: a `SandboxConfig` as JSON."""


@dataclass(frozen=True, slots=True)
class SharedMachinesConfig:
    """What sandboxes of environments run on, and the most that one of them gets, whatever it asks for.

    Disks live in memory, so that a disk of 5 GB is a promise of 5 GB of memory.
    """

    sandbox: SandboxConfig | None = None
    max_memory_mb: int = 8192
    max_disk_mb: int = 2048
    max_processes: int = 256


class SandboxPools:
    """Pools by their whole configuration, each started when it is first asked for, and again where that failed."""

    def __init__(self, start: Callable[[SandboxConfig], Awaitable[Machines]] | None = None) -> None:
        self._start = start or _start_pool
        self._starting: dict[str, asyncio.Task[Machines]] = {}

    @property
    def started(self) -> list[Machines]:
        """Those that there are."""
        done = [one for one in self._starting.values() if one.done() and not _has_failed(one)]
        return [one.result() for one in done]

    async def pool(self, config: SandboxConfig) -> Machines:
        """That of a configuration. Raises: what its start does, to each who waits for it."""
        key = config.model_dump_json()
        starting = self._starting.get(key)
        if starting is None or _has_failed(starting):
            starting = self._starting[key] = asyncio.create_task(self._begin(config), name="sandbox pool")
            starting.add_done_callback(_has_failed)  # which nobody may be left to hear
        return await asyncio.shield(starting)

    async def close(self) -> None:
        """End every machine."""
        for pool in self.started:
            await pool.close()
        self._starting.clear()

    async def _begin(self, config: SandboxConfig) -> Machines:
        return await self._start(config)


def _has_failed(starting: asyncio.Task[Machines]) -> bool:
    return starting.done() and (starting.cancelled() or starting.exception() is not None)


@dataclass
class SharedMachines:
    """Pools by the packages that their machines see."""

    config: SharedMachinesConfig = field(default_factory=SharedMachinesConfig)
    boxes: dict[str, Any] = field(default_factory=dict)
    """What clients know by id; touched in the shared machines's loop only."""
    pools: SandboxPools = field(default_factory=SandboxPools)

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self._thread = LoopThread("sandboxes")

    @property
    def is_usable(self) -> bool:
        """Whether this is the process that it was made in, and it has not been closed."""
        return self._pid == os.getpid() and self._thread.is_alive

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine where the machines are."""
        return self._thread.submit(work)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine where the machines are, and wait for it here."""
        return await asyncio.wrap_future(self.submit(work))

    async def create(
        self, config: MachineConfig, packages: tuple[str, ...] = (), backend: str | None = None
    ) -> Machine:
        """A new machine. To be awaited in the shared machines's loop, like everything that its machines offer."""
        pool = await self._pool(packages, backend)
        return await pool.create(config)

    async def _pool(self, packages: tuple[str, ...], backend: str | None) -> Machines:
        from mettle.sandbox import SandboxConfig

        config = self.config.sandbox or default_sandbox()
        changes: dict[str, Any] = {"python_packages": tuple(sorted({*config.python_packages, *packages}))}
        if backend and backend != config.backend:
            changes |= {"backend": backend, "urls": (), "url_files": ()}
        return await self.pools.pool(SandboxConfig.model_validate({**config.model_dump(), **changes}))

    def close(self) -> None:
        """End every machine."""
        if self.is_usable:
            try:
                self.submit(self.pools.close()).result(_CLOSE_S)
            except concurrent.futures.TimeoutError:
                logger.warning("sandboxes did not end within %.0f s; they end with this process", _CLOSE_S)
            self._thread.close(_CLOSE_S)


async def _start_pool(config: SandboxConfig) -> Machines:
    from mettle.sandbox import open_machines

    return await open_machines(config).__aenter__()


def default_sandbox(given: SandboxConfig | None = None) -> SandboxConfig:
    """What sandboxes run on where an environment asks for nothing of its own (`given` is None, or says nothing).

    That is this host, or what the run that started this process says in `SANDBOX_ENV`: services on a cluster's nodes.
    """
    from mettle.sandbox import SandboxConfig

    if given is not None and given != SandboxConfig():
        return given
    told = os.environ.get(SANDBOX_ENV)
    return SandboxConfig.model_validate_json(told) if told else SandboxConfig()


_lock = threading.Lock()
_current: list[SharedMachines] = []
_configured: list[SharedMachinesConfig] = [SharedMachinesConfig()]


def shared_machines() -> SharedMachines:
    """Those of this process."""
    with _lock:
        if not _current or not _current[0].is_usable:
            _current[:] = [SharedMachines(_configured[0])]
            atexit.register(_current[0].close)
        return _current[0]


def configure(**changes: Any) -> SharedMachinesConfig:
    """Change what sandboxes run on (fields of `SharedMachinesConfig`), for those that are made from now on."""
    with _lock:
        _configured[0] = replace(_configured[0], **changes)
        if _current and _current[0].is_usable:
            _current[0].config = _configured[0]
        return _configured[0]
