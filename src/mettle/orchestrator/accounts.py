"""What has become of groups: written down, counted, and handed on.

Order of the writes: a group's block is on disk before the ledger calls it scored; the decision to drop is in the same
transaction, and so is putting a task back. So a kill between any two lines leaves a task that is rolled out again,
never one that is trained twice or forgotten.
"""

from __future__ import annotations

import asyncio
import logging

from mettle.errors import ProviderError, UserError
from mettle.evals.estimator import mean_of
from mettle.orchestrator.admission import Admission, FailureStreak, GroupVerdict, main_error
from mettle.orchestrator.batcher import Batcher, ReadyGroup, Starvation
from mettle.orchestrator.capacity import Room
from mettle.orchestrator.curriculum import Curriculum
from mettle.orchestrator.dispatcher import Blame, Dispatcher, Ending, OpenGroup
from mettle.orchestrator.metrics import StepStats
from mettle.orchestrator.telling import tell
from mettle.orchestrator.waits import Pulse
from mettle.records.tasks import DropReason, GroupRecord
from mettle.storage.database import transaction_soon
from mettle.storage.ledger import Ledger
from mettle.storage.shards import ShardWriter
from mettle.web.backoff import Backoff

logger = logging.getLogger(__name__)

ALGORITHM_STATE = "algorithm_state"
REJECTED = "rejected_groups"
MAX_BACKOFF_S = 30.0
LASTING = 2
"""Attempts in a row of one task that found the same thing gone, after which somebody is told."""


class GroupAccounts:
    """Each end of a group goes through here once: settled, put back, kept open for another try, or cut short."""

    def __init__(
        self,
        ledger: Ledger,
        shards: ShardWriter,
        *,
        room: Room,
        admission: Admission,
        starvation: Starvation,
        curriculum: Curriculum,
        dispatcher: Dispatcher,
        batcher: Batcher,
        pulse: Pulse,
    ) -> None:
        self._ledger = ledger
        self._shards = shards
        self._room = room
        self._admission = admission
        self._starvation = starvation
        self._curriculum = curriculum
        self._dispatcher = dispatcher
        self._batcher = batcher
        self._pulse = pulse
        self._streak = FailureStreak()
        self._is_loss_told = False
        self.num_finished = 0
        """Attempts that have come to an end, whatever it was."""
        self.num_settled = 0
        """Groups that were trained or dropped for good."""
        self.stats = StepStats(0.0, admission.seq_len)

    @property
    def is_solved(self) -> bool:
        """True when the policy has nothing more to learn from these tasks because it solves them."""
        return self._starvation.is_solved

    async def settle(self, verdict: GroupVerdict) -> None:
        """Write a finished group down and hand it on."""
        group, drop = verdict.group, verdict.drop
        samples = [] if drop is not None else self._admission.samples_of(group)
        if drop is None and not samples:
            drop = DropReason.NO_TOKENS
        await self._record(group, drop)
        if group.rewards:
            self._is_loss_told = False
            mean = mean_of(group.rewards)
            self._curriculum.observe(group.draw.env_id, group.draw.example_id, mean)
        self.stats.observe(group, drop)
        self._room.observe(is_admitted=drop is None)
        self._dispatcher.end(group.draw.draw_id, Ending.SCORED)
        if samples:
            self._batcher.add(ReadyGroup.of(group.draw.draw_id, samples))
        else:
            self._batcher.reject()
        self.num_finished += 1
        self.num_settled += 1
        self._pulse.fire()
        await self._end_if_hopeless(group, drop, verdict.failure)

    async def put_back(self, group: GroupRecord, blame: Blame) -> None:
        """Its task waits for another turn, and others may be opened meanwhile."""
        draw = group.draw
        delay = await self._failed(group, blame)
        async with transaction_soon(self._ledger.database):
            self._ledger.put_back([draw.draw_id])
        self._dispatcher.end(draw.draw_id, Ending.PUT_BACK)
        self._dispatcher.wait([draw], due=asyncio.get_running_loop().time() + delay)
        self.num_finished += 1
        self._pulse.fire()

    async def keep_open(self, group: GroupRecord, blame: Blame) -> float:
        """Its task stays open, so that no other is drawn for it and those after it wait."""
        draw_id = group.draw.draw_id
        delay = await self._failed(group, blame)
        async with transaction_soon(self._ledger.database):
            self._ledger.put_back([draw_id])
            self._ledger.dispatch(draw_id)
        self.num_finished += 1
        self._pulse.fire()
        return delay

    async def cut_short(self, group: OpenGroup) -> None:
        """A group that was cut short waits for another turn; one that never comes in time is dropped."""
        draw = group.draw
        is_hopeless = self._dispatcher.count_failure(draw.draw_id, Blame.TASK) >= self._admission.retry.max_attempts
        async with transaction_soon(self._ledger.database):
            if is_hopeless:
                self._ledger.drop(draw.draw_id, DropReason.STALE)
            else:
                self._ledger.put_back([draw.draw_id])
        self._dispatcher.end(draw.draw_id, Ending.CUT_SHORT)
        if not is_hopeless:
            self._dispatcher.wait([draw], due=asyncio.get_running_loop().time())
        self.stats.num_cut_short += 1
        self.num_finished += 1
        self._pulse.fire()

    async def _failed(self, group: GroupRecord, blame: Blame) -> float:
        """Take a failed attempt down; how long to wait before the next."""
        draw = group.draw
        failures = self._dispatcher.count_failure(draw.draw_id, blame)
        self.stats.observe_errors(group)
        found = main_error(group.rollouts)
        logger.info(
            "group failed and will be tried again",
            extra={"draw_id": draw.draw_id, "env": draw.env_id, "error": found, "failures": failures, "blame": blame},
        )
        is_lasting = blame is Blame.RUN and failures >= LASTING and not self._is_loss_told
        if is_lasting and found is not None and found[0] != ProviderError.kind:  # of the engine the updater tells
            self._is_loss_told = True
            text = f"environment {draw.env_id!r} waits for what is gone, and none of its tasks is charged: {found[1]}"
            logger.warning("%s", text)
            await tell(self._ledger, "services_lost", text)
        return Backoff(self._admission.retry.backoff_s, MAX_BACKOFF_S, jitter=0).wait_s(failures - 1)

    async def _record(self, group: GroupRecord, drop: DropReason | None) -> None:
        async with transaction_soon(self._ledger.database):
            ref = self._shards.append(group)
            state = self._admission.algorithms.state()
            self._ledger.record_scored(group, ref, drop=drop)
            if drop is not None:
                self._ledger.journal.set_fact(REJECTED, self._batcher.num_rejected + 1)
            if state:
                self._ledger.journal.set_fact(ALGORITHM_STATE, state)

    async def _end_if_hopeless(self, group: GroupRecord, drop: DropReason | None, failure: str) -> None:
        if self._streak.observe(group) >= self._admission.retry.max_failed_groups:
            raise UserError(
                f"environment {group.draw.env_id!r} failed every rollout of {self._streak.length} groups in a row; "
                f"the first error was {self._streak.first_error}"
            )
        warning = self._starvation.observe(group, drop, failure)
        if warning is not None:
            logger.warning("%s", warning)
            await tell(self._ledger, "no_signal", warning)
