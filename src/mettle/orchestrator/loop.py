"""The orchestrator: tasks in, batches out, step by step.

Parts: `Orchestrator` wires the others together: it alone knows the whole configuration and the order of a run. Five
tasks run side by side: groups (open, roll out, score), updater (newest weights to the engine), evaluator, the measure
of the event loop's lag, and the steps. Nobody waits for anybody but at the edges named here: a batch waits for its
groups and for v{step-1-max_lag}; the end waits for v{max_steps} and its evaluation.
"""

from __future__ import annotations

import asyncio
import logging
import time

from mettle.errors import UserError
from mettle.orchestrator.accounts import REJECTED, GroupAccounts
from mettle.orchestrator.admission import Admission
from mettle.orchestrator.algorithms import ENVIRONMENT, RunAlgorithms
from mettle.orchestrator.batcher import Batcher, ReadyGroup, Starvation
from mettle.orchestrator.capacity import Room
from mettle.orchestrator.concurrency import Concurrency, EngineLoad
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.dispatcher import Dispatcher, Ending
from mettle.orchestrator.evaluation import EvalSchedule, Evaluator
from mettle.orchestrator.groups import GroupRunner
from mettle.orchestrator.metrics import TOO_LONG, LoopLag, StepStats, update_figures
from mettle.orchestrator.policy import ServedPolicy
from mettle.orchestrator.recovery import check_fits, close_accounts, make_curriculum, recover
from mettle.orchestrator.rollouts import sampling_params
from mettle.orchestrator.server import PolicyServer
from mettle.orchestrator.services import InMemoryServices, Services
from mettle.orchestrator.shipping import assemble, ship
from mettle.orchestrator.source import TaskSource
from mettle.orchestrator.telling import tell
from mettle.orchestrator.updater import Updater
from mettle.orchestrator.waits import Pulse, Waits
from mettle.processes.beats import Gauge, Heartbeat
from mettle.records.tasks import DropReason
from mettle.records.tokens import Batch
from mettle.storage.database import transaction_soon
from mettle.storage.evals import read_evals
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import ShardWriter

logger = logging.getLogger(__name__)


def algorithms_of(config: OrchestratorConfig, source: TaskSource) -> RunAlgorithms:
    """The algorithm of each environment, by name.

    Raises: UserError where it takes advantages from an environment that gives none.
    """
    provides = source.provides_advantages
    choices = {env.name: config.choice_for(env, provides_advantages=provides(env.name)) for env in config.envs}
    for name, (algorithm, _) in choices.items():
        if algorithm == ENVIRONMENT and not provides(name):
            raise UserError(
                f"algorithm {ENVIRONMENT!r} takes the advantages that an environment gives, and {name!r} gives none"
                " (its provides_advantages is false): take another algorithm, as grpo"
            )
    return RunAlgorithms(choices)


class Orchestrator:
    """One run's orchestrator. `run` returns when the run is finished; cancelling it loses nothing."""

    def __init__(
        self,
        config: OrchestratorConfig,
        run_dir: RunDir,
        ledger: Ledger,
        source: TaskSource,
        engine: PolicyServer,
        *,
        services: Services | None = None,
        heart: Heartbeat | None = None,
    ) -> None:
        ratios = {env.name: env.ratio for env in config.envs}
        check_fits(ratios, ledger, source)
        self._config = config
        self._run_dir = run_dir
        self._ledger = ledger
        self._source = source
        self._pulse = Pulse()
        self._policy = ServedPolicy(self._pulse)
        self._heart = heart or Heartbeat(name="orchestrator")
        self._waits = Waits(self._heart, self._pulse)
        self._lag = LoopLag(self._heart)
        self._has_told_of_ends = False
        self._admission = Admission.of(config, algorithms_of(config, source), services or InMemoryServices())
        self._curriculum = make_curriculum(
            config.curriculum_of, ratios, ledger, source, shuffle=config.shuffle, seed=config.seed
        )
        self._dispatcher = Dispatcher(config.inflight_groups)
        self._concurrency = Concurrency(config.fewest_inflight_groups, config.inflight_groups, config.group_size)
        self._batcher = Batcher(config.groups_per_batch, config.max_staleness, max_backfill=config.max_backfill)
        recorded = [(row.kind, row.step, row.env_id) for row in read_evals(ledger.database) if row.is_finished]
        self._schedule = EvalSchedule(config, recorded)
        self._updater = self._make_updater(engine)
        shards, room = ShardWriter(run_dir.rollouts), Room.of(config)
        self._evaluator = Evaluator(
            config, ledger, shards, source, self._schedule, self._policy, self._updater, self._pulse
        )
        self._accounts = self._make_accounts(shards, room)
        self._groups = self._make_groups(room)
        self._recovered = recover(
            run_dir,
            ledger,
            names=ratios,
            admission=self._admission,
            dispatcher=self._dispatcher,
            batcher=self._batcher,
            source=source,
            observe=lambda group: self._accounts.stats.observe(group, None),
        )

    def _make_updater(self, engine: PolicyServer) -> Updater:
        config = self._config
        return Updater(
            engine,
            self._ledger,
            self._policy,
            self._waits,
            self._schedule,
            poll_s=config.poll_s,
            health_s=config.health_s,
            canary_tolerance=config.canary_tolerance,
            inference_budget_s=config.budgets.inference_s,
            on_load=self._fit_to,
        )

    def _make_accounts(self, shards: ShardWriter, room: Room) -> GroupAccounts:
        config = self._config
        return GroupAccounts(
            self._ledger,
            shards,
            room=room,
            admission=self._admission,
            starvation=Starvation(
                config.groups_per_batch, config.max_empty_batches, solved_reward=config.solved_reward
            ),
            curriculum=self._curriculum,
            dispatcher=self._dispatcher,
            batcher=self._batcher,
            pulse=self._pulse,
        )

    def _make_groups(self, room: Room) -> GroupRunner:
        config = self._config
        return GroupRunner(
            self._ledger,
            self._source,
            self._accounts,
            sampling=sampling_params(config.sampling),
            seed=config.sampling_seed,
            is_ordered=config.is_synchronous,
            group_size=config.group_size,
            rollout_timeout_s=config.rollout_timeout_s,
            max_staleness=config.max_staleness,
            room=room,
            admission=self._admission,
            curriculum=self._curriculum,
            dispatcher=self._dispatcher,
            batcher=self._batcher,
            policy=self._policy,
            updater=self._updater,
            pulse=self._pulse,
            is_held=self._is_held,
        )

    def _fit_to(self, load: EngineLoad) -> None:
        """Open as many groups as the engine has memory for."""
        limit = self._concurrency.observe(load, self._dispatcher.num_open)
        if limit != self._dispatcher.max_open:
            logger.info("open groups", extra={"limit": limit, "preempted": load.num_preempted})
            self._dispatcher.max_open = limit
            self._pulse.fire()

    async def run(self) -> None:
        """All steps, then the end of the run."""
        self._accounts.stats.started_at = asyncio.get_running_loop().time()
        self._heart.gauge = self._gauge
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._updater.run(), name="updater"),
                    tasks.create_task(self._evaluator.run(), name="evaluator"),
                    tasks.create_task(self._lag.run(), name="loop lag"),
                ]
                groups = tasks.create_task(self._groups.run(), name="groups")
                last = self._config.max_steps
                for step in range(self._recovered.next_step, self._config.max_steps + 1):
                    self._groups.next_step = step
                    self._pulse.fire()
                    if not await self._step(step):
                        last = await self._end_early(step - 1)
                        break
                groups.cancel()
                await self._finish(last)
                for task in background:
                    task.cancel()
        finally:
            await self._release()

    async def _step(self, step: int) -> bool:
        """Wait for the policy to keep up, collect enough groups, ship. Groups are rolled out all the while.

        False when there is nothing to ship because the policy solves its tasks.
        """
        waited_s = await self._reach(step - 1 - self._config.max_lag)
        await self._drop_stale(step)
        while not self._is_complete:
            if not await self._collect(step):
                return False
            await self._drop_stale(step)
        groups = self._batcher.take()
        # What opens from here on lands in a later batch, also while this one is being written.
        self._groups.next_step = step + 1
        await self._ship(step, groups, waited_s)
        return True

    @property
    def _is_complete(self) -> bool:
        """True when there are enough groups. A group that is still open would be too stale for a later batch where
        none may be stale at all, so that its end is awaited."""
        num_begun = self._dispatcher.num_open + self._dispatcher.num_waiting
        return self._batcher.has_batch and not (self._config.is_synchronous and num_begun)

    def _is_held(self) -> bool:
        """True while an evaluation goes first. Where the seed decides the order of draws, it may not cut in between."""
        return self._evaluator.has_priority and not (self._config.is_synchronous and self._dispatcher.num_open)

    async def _collect(self, step: int) -> bool:
        """Until there are enough groups for a batch. Any group that finishes renews the budget, an evaluation's too."""

        def progress() -> int:
            return self._accounts.num_finished + self._evaluator.num_finished

        while not self._is_complete:
            if self._accounts.is_solved:
                return False
            seen = progress()
            missing = max(self._batcher.num_wanted - self._batcher.num_ready, 0) or self._dispatcher.num_open
            await self._waits.until(
                lambda seen=seen: progress() > seen or self._is_complete,  # type: ignore[misc]
                edge="rollouts",
                awaits=f"{missing} more groups for step {step}",
                budget_s=self._config.budgets.rollouts_s,
            )
        return True

    async def _end_early(self, step: int) -> int:
        """The policy solves its tasks: the run ends with the version that `step` made."""
        text = f"the policy solves its tasks: nothing is left to learn after step {step} of {self._config.max_steps}"
        logger.info("%s", text)
        await tell(self._ledger, "solved", text, step=step)
        self._schedule.end_at(step)
        self._pulse.fire()
        return step

    async def _reach(self, version: int) -> float:
        budgets = self._config.budgets
        # A pinned evaluation holds the update back, so it has the engine's budget and its own.
        inference_s = budgets.inference_s + (budgets.eval_s if self._config.eval.pin else 0.0)
        return await self._policy.reach(version, self._waits, weights_s=budgets.weights_s, inference_s=inference_s)

    async def _drop_stale(self, step: int) -> None:
        stale = self._batcher.sweep(step)
        if not stale:
            return
        text = f"{len(stale)} groups were older than {self._config.max_staleness} versions at step {step}"
        async with transaction_soon(self._ledger.database):
            for group in stale:
                self._ledger.drop(group.draw_id, DropReason.STALE)
            self._ledger.journal.event("orchestrator", "stale_dropped", text, step=step)
        self._accounts.stats.num_stale += len(stale)
        logger.warning("%s", text)
        self._pulse.fire()

    async def _ship(self, step: int, groups: list[ReadyGroup], waited_s: float) -> None:
        now = asyncio.get_running_loop().time()
        stats, self._accounts.stats = self._accounts.stats, StepStats(now, self._config.seq_len)
        figures = stats.figures(now)
        started = time.perf_counter()
        batch = assemble(step, groups)
        pack_s = time.perf_counter() - started
        figures |= {"time/wait_for_policy_s": waited_s, "time/pack_s": pack_s, **self._gauges(batch)}
        facts = lambda: {REJECTED: self._batcher.num_rejected}  # noqa: E731
        await ship(self._ledger, self._run_dir, batch, state=self._state(), figures=figures, facts=facts)
        if figures[TOO_LONG] and not self._has_told_of_ends:
            self._has_told_of_ends = True
            await self._tell_of_ends(step, figures[TOO_LONG])
        logger.info(
            "shipped batch",
            extra={"step": step, "reward": figures.get("reward/mean"), "staleness": batch.staleness[0]},
        )

    async def _tell_of_ends(self, step: int, share: float) -> None:
        """Once: what is cut off is an answer's end, so that a policy that learns to think longer is not taught to."""
        longest = self._config.seq_len
        text = (
            f"{share:.0%} of the rollouts of step {step} are longer than orchestrator.seq_len ({longest}), and their"
            f" ends don't train: raise it, or lower inference.max_model_len; {TOO_LONG} goes on to tell"
        )
        logger.warning("%s", text)
        await tell(self._ledger, "too_long", text, step=step, share=share)

    def _state(self) -> dict[str, object]:
        """The orchestrator's half of a checkpoint. The ledger holds the same in its rows; this is for its readers."""
        return {
            "drawn": self._curriculum.state(),
            "algorithm": self._admission.algorithms.state(),
            "seed": self._config.seed,
        }

    def _gauges(self, batch: Batch) -> dict[str, float]:
        """Figures of the moment of shipping."""
        mean, largest = batch.staleness
        updates, self._updater.updates = self._updater.updates, []
        return {
            "staleness/mean": mean,
            "staleness/max": float(largest),
            "queue/ready_groups": float(self._batcher.num_ready),
            "queue/inflight_groups": float(self._dispatcher.num_open),
            "queue/inflight_limit": float(self._dispatcher.max_open),
            "event_loop_lag/max_ms": self._lag.take_max_ms(),
            **self._source.figures(),
            **update_figures(updates),
        }

    async def _finish(self, last: int) -> None:
        """Wait for the last version and its evaluation, and close the accounts."""
        await self._reach(last)
        await self._waits.until(
            lambda: self._evaluator.is_done,
            edge="evaluation",
            awaits=f"the evaluation of v{last}",
            budget_s=self._config.budgets.eval_s,
        )
        async with transaction_soon(self._ledger.database):
            num_left = close_accounts(self._ledger)
            text = f"finished: v{last} is served and evaluated, {num_left} tasks were left over"
            self._ledger.journal.event("orchestrator", "finished", text)
        logger.info("%s", text)

    async def _release(self) -> None:
        """Put back what is in flight. A kill leaves this to the next start."""
        groups = self._dispatcher.open_groups()
        for group in groups:
            self._dispatcher.end(group.draw.draw_id, Ending.CANCELLED)
        if groups and self._ledger.journal.fact("state") != "finished":
            async with transaction_soon(self._ledger.database):
                self._ledger.put_back([group.draw.draw_id for group in groups])

    def _gauge(self) -> Gauge:
        """Rollouts are the work; what waits for the engine or the trainer is theirs."""
        num_done = self._accounts.num_finished + self._evaluator.num_finished + self._groups.next_step
        return Gauge(num_done, self._policy.is_serving and self._dispatcher.num_open + self._evaluator.num_open > 0)
