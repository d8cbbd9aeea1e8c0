"""Several workers of one environment: who runs what, and what happens when one dies.

Parts: `WorkerPool`. Invariants: a group whose worker dies is run again, on another worker where there is one, up to
`max_attempts` times in all, and as often as it takes where the worker was lost with its place; a worker that died is
replaced, after a wait that doubles while replacements keep dying; a pool none of whose workers can be started any more
fails its requests instead of keeping them waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Self

from mettle.envs.state import State
from mettle.envs.workers.process import Worker, WorkerStats, rows_as_sent
from mettle.envs.workers.spawn import PlaceLost, Spawned, ThisHost, WorkerDied, WorkerHome, WorkerSpec
from mettle.envs.workers.states import state_from
from mettle.errors import MettleError
from mettle.web.backoff import Backoff

logger = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
MAX_FAILED_STARTS = 5


class WorkerPool:
    """`num_workers` processes of one environment. `about` and `rows` start the first, `start` the others.

    `on_death` is told in a line of each worker that ended unasked. Workers are started at `home`, here by default.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        num_workers: int,
        *,
        max_attempts: int = 3,
        silence_s: float = 30.0,
        blocked_s: float = 300.0,
        first_wait_s: float = 0.1,
        on_death: Callable[[str], None] = lambda text: None,
        home: WorkerHome | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"a pool has at least one worker, not {num_workers}")
        self.spec = spec
        self.num_workers = num_workers
        self.num_deaths = 0
        self._max_attempts = max_attempts
        self._on_death = on_death
        self._home = home or ThisHost()
        # Of its own: a start may wait for long, and would keep the threads of everybody else.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="spawn")
        self._silence_s, self._blocked_s = silence_s, blocked_s
        self._backoff = Backoff(first_wait_s, MAX_WAIT_S, jitter=0.0)
        self._first: Spawned | None = None
        self._about: dict[str, Any] | None = None
        self._workers: list[Worker] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._changed: asyncio.Event | None = None
        self._num_failed_starts = 0
        self._failure: MettleError | None = None
        self._is_closed = False

    # Before there is an event loop

    @property
    def about(self) -> dict[str, Any]:
        """What a worker says of its environment. Starts one, where there is none yet."""
        if self._about is None:
            self._about = self._spawned().about
        return self._about

    def rows(self, split: str) -> list[dict[str, Any]]:
        """The rows of `train` or `eval`. Call it before the first group runs."""
        assert not self._workers, "rows are asked for before the workers are at work"
        return self._spawned().rows(split)

    def configure(self, **settings: Any) -> None:
        """Change settings of the environment. Call it before the first group runs."""
        assert not self._workers, "workers that are at work are changed by `set`"
        self.spec = replace(self.spec, settings={**self.spec.settings, **settings})
        if self._first is not None:
            self._first.set(settings)

    def _spawned(self) -> Spawned:
        while self._first is None:
            try:
                self._first = Spawned(self.spec, self._home)
            except PlaceLost as loss:  # another place will load it
                logger.warning("%s", loss)
        return self._first

    # At work

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start every worker; returns when one of them is ready.

        Raises: UserError when the environment cannot be loaded.
        """
        if self._changed is not None:
            return
        self._changed = asyncio.Event()
        try:
            first = self._first if self._first is not None else await self._spawn()
        except MettleError as error:
            self._failure = error
            self._announce()
            raise
        self._first, self._about = None, first.about
        await self._adopt(first)
        for _ in range(self.num_workers - 1):
            self._start_another(0.0)

    async def close(self) -> None:
        """Stop every worker."""
        self._is_closed = True
        self._home.close()
        self._threads.shutdown(wait=False)
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        if self._first is not None:
            self._first.end()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        self._workers = []

    async def set(self, **settings: Any) -> None:
        """Change settings of the environment, here and in every worker to come."""
        self.spec = replace(self.spec, settings={**self.spec.settings, **settings})
        await asyncio.gather(*(worker.request("set", settings=settings) for worker in self._workers))

    async def run_group(
        self,
        rows: Sequence[Mapping[str, Any]],
        client: Mapping[str, Any],
        model: str,
        sampling_args: Mapping[str, Any] | None,
        *,
        max_retries: int = 0,
        is_independent: bool = False,
        columns: Collection[str] = (),
    ) -> list[State]:
        """Run one group in a worker (see `endpoints` for `client`); its states.

        Raises: WorkerDied when the workers that ran it died `max_attempts` times.
        """
        request = {
            "rows": rows_as_sent(rows),
            "client": client,
            "model": model,
            "sampling_args": sampling_args,
            "max_retries": max_retries,
            "is_independent": is_independent,
            "columns": list(columns),
        }
        num_deaths = 0
        while True:
            worker = await self._free_worker()
            try:
                answer = await worker.request("group", **request)
            except WorkerDied as death:
                num_deaths += not isinstance(death, PlaceLost)
                logger.warning("a group lost its worker", extra={"deaths": num_deaths, "error": str(death)})
                if num_deaths == self._max_attempts:
                    raise WorkerDied(f"{death}; the group's {num_deaths} workers all died") from death
                continue
            return [state_from(wired, answer["arrays"]) for wired in answer["states"]]

    def take_max_lag_s(self) -> float:
        """The worst lag of any worker's event loop since this was last asked."""
        return max((worker.take_max_lag_s() for worker in self._workers), default=0.0)

    @property
    def stats(self) -> list[WorkerStats]:
        """How each worker does."""
        return [worker.stats for worker in self._workers]

    async def _free_worker(self) -> Worker:
        """The worker with the least to do, once there is one."""
        await self.start()
        assert self._changed is not None, "start makes the event"
        while True:
            if self._failure is not None:
                raise WorkerDied(f"no worker for {self.spec.env_id} can be started: {self._failure}")
            if self._workers:
                return min(self._workers, key=lambda worker: worker.num_running)
            self._changed.clear()
            await self._changed.wait()

    async def _adopt(self, spawned: Spawned) -> None:
        worker = Worker(spawned, silence_s=self._silence_s, blocked_s=self._blocked_s, on_death=self._bury)
        await worker.start()
        self._workers.append(worker)
        self._announce()

    def _bury(self, worker: Worker) -> None:
        self.num_deaths += 1
        self._workers = [other for other in self._workers if other is not worker]
        logger.warning("worker died", extra={"worker": worker.pid, "env": self.spec.env_id, "how": str(worker.death)})
        self._on_death(f"{worker.death} ({self.spec.env_id}); its groups are run again")
        if worker.stats.num_done:
            self._num_failed_starts = 0
        if not self._is_closed:
            self._start_another(self._backoff.wait_s(self._num_failed_starts))

    def _spawn(self) -> asyncio.Future[Spawned]:
        return asyncio.get_running_loop().run_in_executor(self._threads, self._spawn_in_thread)

    def _spawn_in_thread(self) -> Spawned:
        spawned = Spawned(self.spec, self._home)
        if self._is_closed:  # and the event loop may be, too
            spawned.end()
            raise WorkerDied("the pool was closed while a worker was started")
        return spawned

    def _start_another(self, wait_s: float) -> None:
        task = asyncio.get_running_loop().create_task(self._start_after(wait_s))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_after(self, wait_s: float) -> None:
        while True:
            await asyncio.sleep(wait_s)
            spawning = self._spawn()
            try:
                spawned = await asyncio.shield(spawning)
            except asyncio.CancelledError:
                spawning.add_done_callback(_end_unwanted)
                raise
            except MettleError as error:
                self._num_failed_starts += 1
                logger.warning("a worker could not be started", extra={"error": str(error)})
                self._on_death(f"a worker for {self.spec.env_id} could not be started: {error}")
                if self._num_failed_starts >= MAX_FAILED_STARTS and not self._workers:
                    self._failure = error
                    self._announce()
                    return
                wait_s = self._backoff.wait_s(self._num_failed_starts)
                continue
            await self._adopt(spawned)
            return

    def _announce(self) -> None:
        if self._changed is not None:
            self._changed.set()


def _end_unwanted(spawning: asyncio.Future[Spawned]) -> None:
    if not spawning.cancelled() and spawning.exception() is None:
        spawning.result().end()
