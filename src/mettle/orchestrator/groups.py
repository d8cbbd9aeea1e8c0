"""Groups in flight: opens them while there is room, rolls them out, and has what comes back judged.

A task is committed as in flight before its first request goes out; what becomes of it is written by `GroupAccounts`.

With `is_ordered` groups are judged and settled in the order of their draws, one between two looks at the room, however
they came back: then what is drawn and what a batch holds are functions of the seed and the rollouts alone. A group that
is tried again keeps its place, those that a kill cut short are the first to be opened, and what another version than
the group's has sampled is rolled out again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from mettle.errors import RolloutTimeout
from mettle.evals.source import GroupRequest, failed_rollouts
from mettle.orchestrator.accounts import GroupAccounts
from mettle.orchestrator.admission import Admission
from mettle.orchestrator.batcher import Batcher
from mettle.orchestrator.capacity import Room
from mettle.orchestrator.curriculum import Curriculum
from mettle.orchestrator.dispatcher import Blame, Dispatcher, OpenGroup
from mettle.orchestrator.policy import ServedPolicy
from mettle.orchestrator.rollouts import group_seed
from mettle.orchestrator.source import TaskSource
from mettle.orchestrator.updater import Updater
from mettle.orchestrator.waits import Pulse
from mettle.records.sampling import SamplingParams
from mettle.records.tasks import GroupRecord, RolloutRecord
from mettle.records.versions import staleness
from mettle.storage.database import transaction_soon
from mettle.storage.ledger import Ledger


class GroupRunner:
    """One task runs it; each open group is a task of its own inside."""

    def __init__(
        self,
        ledger: Ledger,
        source: TaskSource,
        accounts: GroupAccounts,
        *,
        sampling: SamplingParams,
        seed: int,
        is_ordered: bool,
        group_size: int,
        rollout_timeout_s: float,
        max_staleness: int,
        room: Room,
        admission: Admission,
        curriculum: Curriculum,
        dispatcher: Dispatcher,
        batcher: Batcher,
        policy: ServedPolicy,
        updater: Updater,
        pulse: Pulse,
        is_held: Callable[[], bool],
    ) -> None:
        self._ledger = ledger
        self._source = source
        self._accounts = accounts
        self._sampling = sampling
        self._seed = seed
        self._is_ordered = is_ordered
        self._group_size = group_size
        self._rollout_timeout_s = rollout_timeout_s
        self._max_staleness = max_staleness
        self._room = room
        self._admission = admission
        self._curriculum = curriculum
        self._dispatcher = dispatcher
        self._batcher = batcher
        self._policy = policy
        self._updater = updater
        self._pulse = pulse
        self._is_held = is_held
        self.next_step = 1
        self._num_looked = 0
        self._rolling: dict[int, asyncio.Task[tuple[RolloutRecord, ...]]] = {}

    async def run(self) -> None:
        """Keep groups open while there is room, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._cut_short()
                for group in await self._open_groups():
                    tasks.create_task(self._run_group(group))
                if self._is_ordered and self._num_looked != self._accounts.num_settled:
                    self._num_looked = self._accounts.num_settled
                    self._pulse.fire()
                due = self._dispatcher.next_due
                now = asyncio.get_running_loop().time()
                await self._pulse.wait(None if due is None or due <= now else due - now)

    async def _open_groups(self) -> list[OpenGroup]:
        """Take waiting tasks, then new ones, and commit all of them as in flight."""
        if self._num_wanted() <= 0:
            return []
        async with transaction_soon(self._ledger.database):
            # Asked again: other tasks may have run until this one could write.
            num_wanted = self._num_wanted()
            if num_wanted <= 0:
                return []
            now = asyncio.get_running_loop().time()
            draws = self._dispatcher.take(num_wanted, now)
            # Where everything fails at once, tasks that wait for their next attempt must not pile up without end.
            num_new = min(num_wanted - len(draws), self._dispatcher.max_open - self._dispatcher.num_waiting)
            if num_new > 0:
                draws += self._ledger.draw_tasks(self._curriculum.draw(num_new))
            for draw in draws:
                self._ledger.dispatch(draw.draw_id)
        return [self._dispatcher.open(draw, self._policy.version, now) for draw in draws]

    def _num_wanted(self) -> int:
        """Groups to open now."""
        if not self._policy.is_serving or self._is_held():
            return 0
        room = self._room.for_groups(
            step=self.next_step,
            version=self._policy.version,
            num_ready=self._batcher.num_ready,
            num_running=self._dispatcher.num_open,
        )
        if self._is_ordered:
            is_current = self._policy.version + 1 >= self.next_step
            room = max(0 if self._batcher.has_batch else room, self._dispatcher.num_waiting if is_current else 0)
        return min(self._dispatcher.num_permits, room)

    async def _run_group(self, group: OpenGroup) -> None:
        while True:
            incarnation = self._policy.incarnation
            rollouts = await self._rolled_out(group)
            if rollouts is None:
                await self._accounts.cut_short(group)
                return
            while self._is_ordered and not self._is_its_turn(group.draw.draw_id):
                await self._pulse.wait()
            record, blame = GroupRecord(group.draw, group.version, rollouts), Blame.RUN
            if not await self._is_void(record, incarnation):
                verdict = await self._admission.judge(record, self._dispatcher.failures(group.draw.draw_id))
                if not verdict.is_retried:
                    await self._accounts.settle(verdict)
                    return
                record, blame = verdict.group, verdict.blame
            if not self._is_ordered:
                await self._accounts.put_back(record, blame)
                return
            await self._wait_in_place(await self._accounts.keep_open(record, blame))

    def _cut_short(self) -> None:
        """End the rollouts of groups that could only land in a batch for which their first tokens are too stale.

        Not where nothing stale is trained: there a batch waits for its groups."""
        if self._is_ordered:
            return
        for group in self._dispatcher.open_groups():
            rolling = self._rolling.get(group.draw.draw_id)
            if rolling is not None and staleness(self.next_step, group.version) > self._max_staleness:
                rolling.cancel()

    async def _rolled_out(self, group: OpenGroup) -> tuple[RolloutRecord, ...] | None:
        """The group's rollouts; None when they were cut short."""
        draw_id = group.draw.draw_id
        rolling = self._rolling[draw_id] = asyncio.create_task(self._roll_out(group))
        try:
            await asyncio.wait([rolling])
        finally:  # the run may end under it
            del self._rolling[draw_id]
            rolling.cancel()
        return None if rolling.cancelled() else rolling.result()

    def _is_its_turn(self, draw_id: int) -> bool:
        return self._num_looked == self._accounts.num_settled and self._dispatcher.oldest_draw == draw_id

    async def _is_void(self, group: GroupRecord, incarnation: str) -> bool:
        """True when what came back is the engine's doing and says nothing of the task."""
        unanswered = [r.error_kind == "provider" for r in group.rollouts]
        is_hit = any(unanswered) if self._is_ordered else all(unanswered)
        if is_hit and await self._is_engine_to_blame(incarnation):
            return True
        if not self._is_ordered:
            return False
        sampled = [r.version_range for r in group.rollouts if r.num_completion_tokens]
        version = group.version_at_start
        return any(found != (version, version) for found in sampled)

    async def _roll_out(self, group: OpenGroup) -> tuple[RolloutRecord, ...]:
        """The group's rollouts, whatever happens: a source that raises or hangs gives failed ones."""
        draw = group.draw
        prefix = f"t{draw.draw_id}"
        failures = self._dispatcher.failures(draw.draw_id)
        seed = group_seed(self._seed, prefix, sum(n for blame, n in failures.items() if blame is not Blame.RUN))
        sampling = replace(self._sampling, seed=seed)
        request = GroupRequest(draw.env_id, draw.example_id, prefix, self._group_size, sampling)
        try:
            async with asyncio.timeout(self._rollout_timeout_s) as deadline:
                return await self._source.run_group(request)
        except TimeoutError as error:
            if not deadline.expired():
                return failed_rollouts(request, error)
            late = RolloutTimeout(f"the group took longer than rollout_timeout_s ({self._rollout_timeout_s:g})")
            return failed_rollouts(request, late)
        except Exception as error:
            return failed_rollouts(request, error)

    async def _is_engine_to_blame(self, incarnation: str) -> bool:
        """True when the engine is gone or has been restarted since, so that the failure says nothing of the task."""
        health = await self._updater.probe()
        return health is None or health.incarnation != incarnation

    async def _wait_in_place(self, delay: float) -> None:
        """Before a group that stays open is tried again: nothing else of it waits meanwhile."""
        await asyncio.sleep(delay)
        while not self._policy.is_serving:
            await self._pulse.wait()
