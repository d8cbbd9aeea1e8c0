"""The machines of a pool by id, and the end of each when its time is over.

Invariant: a machine that is not in here any more has ended or is ending; `close` waits until all have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Generic, Protocol, TypeVar

from mettle.errors import SandboxError

logger = logging.getLogger(__name__)


class Registered(Protocol):
    """What is needed of a machine."""

    id: str

    def left_s(self) -> float | None: ...

    def why_due(self) -> str: ...

    async def delete(self, why: str = ...) -> None: ...


M = TypeVar("M", bound=Registered)


class MachineRegistry(Generic[M]):
    """Machines that have been made and have not ended."""

    def __init__(self) -> None:
        self._machines: dict[str, M] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._endings: set[asyncio.Task[None]] = set()

    def all(self) -> tuple[M, ...]:
        return tuple(self._machines.values())

    def get(self, machine_id: str) -> M:
        """A machine by its id; SandboxError when there is none."""
        machine = self._machines.get(machine_id)
        if machine is None:
            raise SandboxError(f"there is no machine {machine_id!r}; it has ended, or never was")
        return machine

    def add(self, machine: M) -> None:
        """Keep it until it ends, and end it when its time is over."""
        self._machines[machine.id] = machine
        self._schedule(machine)

    def forget(self, machine: M) -> None:
        """It has ended."""
        self._machines.pop(machine.id, None)
        timer = self._timers.pop(machine.id, None)
        if timer is not None:
            timer.cancel()

    async def close(self) -> None:
        """End them all."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        machines, self._machines = list(self._machines.values()), {}
        async with asyncio.TaskGroup() as group:
            for machine in machines:
                group.create_task(machine.delete("its pool was closed"))
        for ending in list(self._endings):
            with contextlib.suppress(asyncio.CancelledError):
                await ending

    def _schedule(self, machine: M) -> None:
        """Look again when the machine's time may be over."""
        left_s = machine.left_s()
        if left_s is not None:
            timer = asyncio.get_running_loop().call_later(left_s, self._end_if_due, machine)
            self._timers[machine.id] = timer

    def _end_if_due(self, machine: M) -> None:
        why = machine.why_due()
        if not why:
            self._schedule(machine)
            return
        logger.info("ending a machine", extra={"machine": machine.id, "why": why})
        ending = asyncio.create_task(machine.delete(why), name="machine end")
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
