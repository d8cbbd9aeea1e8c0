"""Coroutines on one `poll`, for a process that forks: what asyncio is elsewhere.

asyncio itself would cost every container 90 ms of processor time and 9 MB (CPython 3.11), and each fork the hooks of
`threading`. Parts: `Loop`, `Task`, `LoopEvent`; `readable` and `writable` wait for a descriptor.
Invariant: a task that is cancelled gets `Cancelled` where it waits, once; one that fails says so on standard error, and
ends alone.
"""

from __future__ import annotations

import select
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Final

_NEVER: Final = float("inf")


class Cancelled(BaseException):
    """Nobody wants this task any more."""


class LoopWait:
    """What a task waits for: a descriptor, an event, a time, or the first of them."""

    __slots__ = ("deadline", "descriptor", "event", "events")

    def __init__(
        self, descriptor: int = -1, events: int = 0, event: LoopEvent | None = None, s: float | None = None
    ) -> None:
        self.descriptor = descriptor
        self.events = events
        self.event = event
        self.deadline = _NEVER if s is None else time.monotonic() + s


@types.coroutine
def _wait(wait: LoopWait) -> Generator[LoopWait, bool, bool]:
    """Whether it came, and not the deadline."""
    return (yield wait)


async def readable(descriptor: int) -> bool:
    """LoopWait until a descriptor can be read, or has ended; False when somebody else woke the task."""
    return await _wait(LoopWait(descriptor, select.POLLIN))


async def writable(descriptor: int, timeout_s: float | None = None) -> bool:
    """LoopWait until a descriptor can be written; False when it was not in time."""
    return await _wait(LoopWait(descriptor, select.POLLOUT, s=timeout_s))


class LoopEvent:
    """Something that happens once, or again after `clear`."""

    def __init__(self) -> None:
        self.is_set = False
        self.tasks: set[Task] = set()

    def set(self) -> None:
        self.is_set = True
        for task in list(self.tasks):
            task.wake(True)

    def clear(self) -> None:
        self.is_set = False

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has happened, in time."""
        return self.is_set or await _wait(LoopWait(event=self, s=timeout_s))


class Task:
    """One coroutine."""

    def __init__(self, loop: Loop, work: Coroutine[LoopWait, bool | None, None]) -> None:
        self._loop = loop
        self.work = work
        self.waits_for: LoopWait | None = None
        self.is_to_end = False
        self.ended = LoopEvent()

    def cancel(self) -> None:
        if not self.ended.is_set:
            self.is_to_end = True
            self.wake(False)

    def wake(self, has_come: bool) -> None:
        """End its wait, whatever it waits for."""
        if self.waits_for is not None:
            self._loop.resume(self, has_come)


class Loop:
    """All tasks of a process."""

    def __init__(self) -> None:
        self._poller = select.poll()
        self._ready: deque[tuple[Task, bool | None]] = deque()  # a coroutine begins with None
        self._waiting: set[Task] = set()
        self._tasks_of: dict[tuple[int, int], Task] = {}
        self.is_over = False

    def spawn(self, work: Coroutine[LoopWait, bool | None, None]) -> Task:
        task = Task(self, work)
        self._ready.append((task, None))
        return task

    def resume(self, task: Task, has_come: bool) -> None:
        """Let a task that waits go on."""
        wait, task.waits_for = task.waits_for, None
        assert wait is not None, "only a task that waits is resumed"
        self._waiting.discard(task)
        if wait.event is not None:
            wait.event.tasks.discard(task)
        if wait.descriptor >= 0:
            del self._tasks_of[wait.descriptor, wait.events]
            self._poll(wait.descriptor)
        self._ready.append((task, has_come))

    def run(self, look: Callable[[], float | None]) -> None:
        """Run until `is_over`. `look` is called at each turn, and says in how many seconds to call it again."""
        while not self.is_over:
            while self._ready:
                self._step(*self._ready.popleft())
            pause_s = look()
            if not self.is_over and not self._ready:
                self._sleep(pause_s)

    def _sleep(self, pause_s: float | None) -> None:
        now = time.monotonic()
        until = min((task.waits_for.deadline for task in self._waiting if task.waits_for), default=_NEVER)
        until = until if pause_s is None else min(until, now + pause_s)
        found = self._poller.poll(None if until == _NEVER else max(0.0, until - now) * 1000 + 1)
        for descriptor, events in found:
            for kind in (select.POLLIN, select.POLLOUT):
                task = self._tasks_of.get((descriptor, kind))
                if task is not None and events & ~(select.POLLIN | select.POLLOUT) | events & kind:
                    self.resume(task, True)
        now = time.monotonic()
        for task in [task for task in self._waiting if task.waits_for and task.waits_for.deadline <= now]:
            self.resume(task, False)

    def _step(self, task: Task, has_come: bool | None) -> None:
        try:
            if task.is_to_end:
                task.is_to_end = False
                wait = task.work.throw(Cancelled())
            else:
                wait = task.work.send(has_come)
        except (StopIteration, Cancelled):
            task.ended.set()
        except Exception:
            traceback.print_exc()
            task.ended.set()
        else:
            self._park(task, wait)

    def _park(self, task: Task, wait: LoopWait) -> None:
        task.waits_for = wait
        self._waiting.add(task)
        if wait.event is not None:
            wait.event.tasks.add(task)
        if wait.descriptor >= 0:
            self._tasks_of[wait.descriptor, wait.events] = task
            self._poll(wait.descriptor)

    def _poll(self, descriptor: int) -> None:
        events = sum(kind for kind in (select.POLLIN, select.POLLOUT) if (descriptor, kind) in self._tasks_of)
        if events:
            self._poller.register(descriptor, events)
        else:
            self._poller.unregister(descriptor)
