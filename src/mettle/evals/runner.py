"""Running an evaluation: groups side by side within limits, each rollout kept when it ends, failures told apart.

Parts: `EvalTask` (what is measured), `EvalRunner` (runs what is missing), `GroupRetry`, `Keeper` (where rollouts go),
`StoreKeeper`. The runner knows a source of rollouts and no environments; `mettle.envs`, the orchestrator, the warm-up's
probe and GEPA are its callers. Invariants: a finished rollout is kept before anybody is told of it; one rollout's
failure never ends the evaluation, a full disk and a refusal that every rollout would meet do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mettle.evals.refusals import Refusals
from mettle.evals.slots import Slots
from mettle.evals.source import GroupRequest, RolloutSource, failed_rollouts
from mettle.records.sampling import SamplingParams
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw
from mettle.storage.database import RETRY_S, DatabaseBusy
from mettle.storage.evals import EvalStore


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A task that is measured: what tells it apart, how many rollouts of it are wanted, and what each begins with."""

    example_id: Any
    uid: str
    num_rollouts: int
    rows: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class GroupRetry:
    """Groups in which a rollout failed with one of `kinds` are run again, `max_attempts` times in all."""

    kinds: Collection[str]
    max_attempts: int
    backoff_s: float


class Keeper(Protocol):
    """Where finished rollouts go."""

    async def keep(self, group: GroupRecord) -> None:
        """Return when the rollouts are safe. Raises: StorageError when they cannot be."""
        ...


COMMIT_INTERVAL_S = 0.005
"""Least time between two transactions: a thousand rollouts a second are two hundred transactions."""


class StoreKeeper:
    """Writes to the store of a run: at once, or together with whatever ends within `COMMIT_INTERVAL_S` of the last."""

    def __init__(self, store: EvalStore, eval_id: int) -> None:
        self._store = store
        self._eval_id = eval_id
        self._written_at = 0.0
        self._waiting: list[tuple[GroupRecord, asyncio.Future[None]]] = []

    async def keep(self, group: GroupRecord) -> None:
        """Return when the group is committed."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            # At the soonest behind whatever is ready to run now, so that what ends together is written together.
            loop.call_later(max(0.0, self._written_at + COMMIT_INTERVAL_S - loop.time()), self.flush)
        self._waiting.append((group, written))
        await written

    def flush(self) -> None:
        """Write what waits. Its owners may be cancelled: their rollouts have ended all the same."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        try:
            self._store.add(self._eval_id, [group for group, _ in waiting])
        except DatabaseBusy:
            self._waiting = waiting
            asyncio.get_running_loop().call_later(RETRY_S, self.flush)
            return
        except Exception as error:  # of a callback of the loop nobody would hear it, and its owners would wait for ever
            for _, written in waiting:
                if not written.done():
                    written.set_exception(error)
            return
        self._written_at = asyncio.get_running_loop().time()
        for _, written in waiting:
            if not written.done():
                written.set_result(None)


class EvalRunner:
    """Runs `requests` of one environment. `max_groups` bounds the groups under way; -1 is no bound.

    `slots` bounds rollouts, over every evaluation that shares it. A request whose rollouts are independent
    (`is_split`) is run as one request a rollout, each kept as soon as it ends. `on_rollouts` is told of what is kept,
    `on_group` of each whole request. `refusals` end it all
    when an endpoint refuses for good.
    """

    def __init__(
        self,
        source: RolloutSource,
        *,
        keeper: Keeper | None = None,
        max_groups: int = -1,
        slots: Slots | None = None,
        is_split: bool = False,
        retry: GroupRetry | None = None,
        version: int = 0,
        refusals: Refusals | None = None,
        on_rollouts: Callable[[Sequence[RolloutRecord]], None] | None = None,
        on_group: Callable[[Sequence[RolloutRecord]], Awaitable[None]] | None = None,
    ) -> None:
        self._source = source
        self._keeper = keeper
        self._max_groups = max_groups
        self._slots = slots
        self._is_split = is_split
        self._retry = retry
        self._version = version
        self._on_rollouts = on_rollouts
        self._on_group = on_group
        self._refusals = refusals

    async def run(self, requests: Sequence[GroupRequest]) -> None:
        """Run all of them.

        Raises: UserError when an endpoint refuses for good what every rollout asks, StorageError when a rollout
        cannot be kept.
        """
        pending = iter(requests)
        num_workers = min(len(requests), self._max_groups) if self._max_groups > 0 else len(requests)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(num_workers):
                    workers.create_task(self._work(pending))
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None

    async def _work(self, pending: Iterator[GroupRequest]) -> None:
        for request in pending:
            if self._is_split and request.size > 1:
                async with asyncio.TaskGroup() as members:
                    tasks = [members.create_task(self._run(one)) for one in split(request)]
                records = tuple(record for task in tasks for record in task.result())
            else:
                records = await self._run(request)
            if self._on_group is not None:
                await self._on_group(records)

    async def _run(self, request: GroupRequest) -> tuple[RolloutRecord, ...]:
        """The rollouts of a request, tried again as the policy says, and kept."""
        num_attempts = 0
        while True:
            async with self._slots.take(request.size) if self._slots is not None else nullcontext():
                try:
                    records = await self._source.run_group(request)
                except Exception as error:
                    records = failed_rollouts(request, error)
                num_attempts += 1
                is_last = self._retry is None or not _is_worth_another(self._retry, records, num_attempts)
                # Kept before the slot is free: a kill costs what has a slot, and not also what waits to be written.
                if is_last and self._keeper is not None:
                    draw = TaskDraw(-1, request.env, request.uid, 0, request.example_id)
                    await self._keeper.keep(GroupRecord(draw, self._version, records))
            if is_last:
                break
            assert self._retry is not None, "only a policy of retries asks for another attempt"
            await asyncio.sleep(self._retry.backoff_s)
        if self._on_rollouts is not None:
            self._on_rollouts(records)
        if self._refusals is not None:
            self._refusals.see(records)
        return records


def requests_for(
    tasks: Iterable[EvalTask],
    *,
    env: str,
    prefix: str,
    done: Mapping[Any, Collection[int]] | None = None,
    is_whole_groups: bool = False,
    sampling: SamplingParams | None = None,
) -> list[GroupRequest]:
    """What is left to run of `tasks`, of which `done` has the positions that need not be, by `example_key`.

    With `is_whole_groups`, rollouts that are scored together are run together or not at all.
    """
    requests = []
    for task in tasks:
        kept = (done or {}).get(example_key(task.example_id), ())
        missing = [position for position in range(task.num_rollouts) if position not in kept]
        if missing and is_whole_groups:
            missing = list(range(task.num_rollouts))
        if missing:
            requests.append(
                GroupRequest(
                    env, task.example_id, f"{prefix}-{task.example_id}", len(missing), sampling or SamplingParams(),
                    is_eval=True, positions=tuple(missing), uid=task.uid,
                    rows=tuple(task.rows[position] for position in missing) if task.rows else (),
                )
            )  # fmt: skip
    return requests


def example_key(example_id: Any) -> str:
    """What tells examples apart, whatever their ids are: 1 and "1" are two, as JSON has them."""
    return example_id if isinstance(example_id, str) else f"\0{example_id!r}"


def first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that a group of tasks ended with."""
    first = failures.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


def split(request: GroupRequest) -> list[GroupRequest]:
    """A request for each rollout of one."""
    return [
        replace(request, size=1, positions=(position,), rows=request.rows[place : place + 1])
        for place, (_, position) in enumerate(request.rollouts)
    ]


def _is_worth_another(retry: GroupRetry, records: Sequence[RolloutRecord], num_attempts: int) -> bool:
    failed = {record.error_kind for record in records if record.reward is None}
    return bool(failed & set(retry.kinds)) and num_attempts < retry.max_attempts
