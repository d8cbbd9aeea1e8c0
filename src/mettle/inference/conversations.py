"""The requests of an engine that is reached over a wire: each is a task in the event loop of one thread.

`RemoteEngine` and `VllmEngine` say how one request is spoken (`Converse`); who waits, who is aborted and that a
listener hears exactly one end is settled here. Invariant: after `close` there is no task, no connection and no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mettle.errors import MettleError, ServiceError
from mettle.inference.engine.protocol import EngineBusy, EngineStopped, GenerationRequest, TokenListener
from mettle.inference.engine.sequences import CountedListener, RunningRequest

logger = logging.getLogger(__name__)

Converse = Callable[[RunningRequest], Coroutine[Any, Any, None]]
"""Speaks one request to its end and settles it. It is cancelled when the request is aborted: it may then still bring
home what the other side has; what it leaves open ends with the tokens that came."""
Result = TypeVar("Result")


class Conversations:
    """A thread with an event loop, and the requests in it. `max_outstanding` bounds their choices."""

    def __init__(self, name: str, converse: Converse, max_outstanding: int | None = None) -> None:
        self._converse = converse
        self.max_outstanding = max_outstanding
        self._lock = threading.Lock()
        self._end: MettleError | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.num_outstanding = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self, request: GenerationRequest, listener: TokenListener) -> None:
        """Begin a request that was checked. Raises: EngineBusy, EngineStopped."""
        with self._lock:
            if self._end is not None:
                raise EngineStopped(str(self._end))
            if self.max_outstanding is not None and self.num_outstanding + request.n > self.max_outstanding:
                raise EngineBusy(f"{self.num_outstanding} sequences run or wait and no more are taken; try again later")
            self.num_outstanding += request.n
            running = RunningRequest(request, CountedListener(listener, lambda: self._count_out(request.n)))
            self._loop.call_soon_threadsafe(self._begin, running)

    def abort(self, request_id: str) -> None:
        """End a request with what it has; an unknown one is ignored."""
        self._post(lambda: self._cancel(request_id))

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do something in the loop and wait for it, from another thread. Raises: EngineStopped after the end."""
        with self._lock:
            if self._end is not None:
                work.close()
                raise EngineStopped(str(self._end))
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin something that goes on until `close`."""
        self._post(lambda: self._keep(self._loop.create_task(work)))

    def end(self, error: MettleError) -> None:
        """Take no more, and fail what runs. From any thread; the first error counts."""
        with self._lock:
            if self._end is not None:
                return
            self._end = error
        self._post(self._cancel_all)

    def close(self, farewell: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Abort what runs, do `farewell` in the loop, and end the thread."""
        with self._lock:
            if self._loop.is_closed():
                return
            self._end = self._end or EngineStopped("the engine is shutting down")
        asyncio.run_coroutine_threadsafe(self._leave(farewell), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _post(self, do: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, with all that it would end
            self._loop.call_soon_threadsafe(do)

    def _begin(self, running: RunningRequest) -> None:
        request_id = running.request.request_id
        if self._end is not None:
            running.fail(self._end)
            return
        task = self._tasks[request_id] = self._loop.create_task(self._settle(running))
        task.add_done_callback(lambda ended: self._forget(request_id, running, ended))

    async def _settle(self, running: RunningRequest) -> None:
        try:
            await self._converse(running)
        except MettleError as error:
            running.fail(error)
        except Exception as error:
            # The boundary of the task: nobody awaits it, and its listener must hear of the end.
            logger.exception("a request failed")
            running.fail(ServiceError(f"the engine failed under a request: {type(error).__name__}: {error}"))
        else:
            running.fail(ServiceError("the engine ended a request without an answer"))  # unless it is settled

    def _forget(self, request_id: str, running: RunningRequest, task: asyncio.Task[None]) -> None:
        # Here and not in the task: one that is cancelled before its first step never gets to say anything.
        self._tasks.pop(request_id, None)
        if not task.cancelled():
            return
        if self._end is None or isinstance(self._end, EngineStopped):
            running.abort()
        else:
            running.fail(self._end)

    def _cancel(self, request_id: str) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks[f"task {id(task)}"] = task

    def _cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _leave(self, farewell: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        tasks = list(self._tasks.values())
        self._cancel_all()
        await asyncio.gather(*tasks, return_exceptions=True)
        if farewell is not None:
            await farewell()

    def _count_out(self, num_choices: int) -> None:
        with self._lock:
            self.num_outstanding -= num_choices
