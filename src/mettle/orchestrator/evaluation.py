"""Evaluations on held-out tasks, while training goes on.

Parts: `EvalSchedule` (which versions are due, and which the engine must hold for that), `Evaluator` (runs them, with
the runner that every evaluation has), `PinnedSource` (rollouts of one version). Invariants: a rollout is in the store
when it ends, so that a restart repeats none of it while the engine serves the version; with `pin` all tokens of an
evaluation come from one version, and a group that a restarted engine sampled otherwise is rolled out again. New
training groups wait until all groups of an evaluation are under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from mettle.errors import RolloutTimeout
from mettle.evals.estimator import RunningMean, mean_of, mean_over_tasks, pass_at_k
from mettle.evals.runner import EvalRunner, EvalTask, GroupRetry, StoreKeeper, example_key, requests_for
from mettle.evals.source import GroupRequest, failed_rollouts
from mettle.orchestrator.config import EnvConfig, OrchestratorConfig
from mettle.orchestrator.policy import ServedPolicy
from mettle.orchestrator.rollouts import group_seed, sampling_params
from mettle.orchestrator.source import TaskSource
from mettle.orchestrator.telling import tell
from mettle.orchestrator.updater import Updater
from mettle.orchestrator.waits import Pulse
from mettle.records.tasks import RolloutRecord
from mettle.storage.database import transaction_soon
from mettle.storage.evals import EvalPlan, EvalStore, read_evals
from mettle.storage.ledger import Ledger
from mettle.storage.rollouts import RolloutRow, rollout_rows
from mettle.storage.shards import ShardWriter

logger = logging.getLogger(__name__)

BASELINE, INTERIM, FINAL = "baseline", "interim", "final"
SOLVED = 1.0 - 1e-6


class EvalSchedule:
    """The versions that wait to be evaluated, oldest first, with the environments still missing."""

    def __init__(self, config: OrchestratorConfig, recorded: Iterable[tuple[str, int, str]]) -> None:
        self.is_pinned = config.eval.pin
        self._config = config
        self._done = set(recorded)
        self._due: dict[int, tuple[str, list[str]]] = {}
        for version, kind in eval_versions(config):
            self._add(version, kind)

    def _add(self, version: int, kind: str) -> None:
        missing = [env.name for env in self._config.eval_envs if (kind, version, env.name) not in self._done]
        if missing:
            self._due[version] = (kind, missing)

    def end_at(self, version: int) -> None:
        """The run ends with `version`: later ones will not be, and this one is evaluated as the last."""
        self._due = {due: what for due, what in self._due.items() if due < version}
        if self._config.eval.at_end and self._config.eval.num_examples:
            self._add(version, FINAL)

    @property
    def versions(self) -> list[int]:
        """Versions that wait to be evaluated."""
        return list(self._due)

    def due(self, version: int) -> tuple[str, list[str]] | None:
        """(kind, environments) of the evaluation of a version, if it waits."""
        return self._due.get(version)

    def finish(self, version: int) -> None:
        """A version has been evaluated, or never will be."""
        del self._due[version]

    def target(self, current: int, newest: int) -> int:
        """The version that the engine should serve next: each that is due in its turn, otherwise the newest."""
        if self.is_pinned and current in self._due:
            return current
        return min((version for version in self._due if current < version <= newest), default=newest)


def eval_versions(config: OrchestratorConfig) -> list[tuple[int, str]]:
    """(version, kind) of each evaluation of a run. A version is evaluated once, as the first kind that fits."""
    found: dict[int, str] = {}
    if config.eval.num_examples == 0:
        return []
    if config.eval.at_start:
        found[0] = BASELINE
    if config.eval.at_end:
        found.setdefault(config.max_steps, FINAL)
    if config.eval.interval:
        for version in range(config.eval.interval, config.max_steps, config.eval.interval):
            found.setdefault(version, INTERIM)
    return sorted(found.items())


class Evaluator:
    """Runs what the schedule says as soon as the engine serves the version. One task runs it."""

    def __init__(
        self,
        config: OrchestratorConfig,
        ledger: Ledger,
        shards: ShardWriter,
        source: TaskSource,
        schedule: EvalSchedule,
        policy: ServedPolicy,
        updater: Updater,
        pulse: Pulse,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._store = EvalStore(ledger.database, shards)
        self._source = source
        self._schedule = schedule
        self._policy = policy
        self._updater = updater
        self._pulse = pulse
        self._sampling = sampling_params(config.eval_sampling)
        self._num_waiting = 0
        self.num_open = 0
        self.num_finished = 0

    @property
    def has_priority(self) -> bool:
        """True while groups of an evaluation wait for their turn, so that training opens none."""
        return self._num_waiting > 0

    @property
    def is_done(self) -> bool:
        """True when nothing is left to evaluate."""
        return not self._schedule.versions

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            version = self._policy.version
            await self._skip_before(version)
            due = self._schedule.due(version)
            if due is None or not self._policy.is_serving:
                await self._pulse.wait()
                continue
            kind, names = due
            for env in self._config.eval_envs:
                if env.name in names:
                    await self._evaluate(env, kind, version)
            self._schedule.finish(version)
            self._pulse.fire()

    async def _skip_before(self, version: int) -> None:
        """Versions that the engine has gone past cannot be evaluated any more."""
        for missed in [v for v in self._schedule.versions if v < version]:
            text = f"v{missed} was replaced by v{version} before it could be evaluated"
            logger.warning("%s", text)
            await tell(self._ledger, "eval_missed", text, version=missed)
            self._schedule.finish(missed)

    async def _evaluate(self, env: EnvConfig, kind: str, version: int) -> None:
        num_tasks = self._source.num_tasks(env.name, is_eval=True)
        count = num_tasks if self._config.eval.num_examples < 0 else min(num_tasks, self._config.eval.num_examples)
        size = self._config.eval.rollouts_per_example
        uids = [self._source.uid(env.name, example, is_eval=True) for example in range(count)]
        tasks = [EvalTask(example, uid, size) for example, uid in enumerate(uids)]
        async with transaction_soon(self._ledger.database):
            eval_id, done = self._begin(env, kind, version, tasks)
            text = f"{kind} evaluation of v{version} on {env.name}"
            self._ledger.journal.event("orchestrator", "eval_started", text, tasks=count)
        requests = requests_for(
            tasks, env=env.name, prefix=f"e{version}-{kind}-{env.name}", done=done, is_whole_groups=True,
            sampling=self._sampling,
        )  # fmt: skip
        root = self._config.eval_sampling_seed
        requests = [
            replace(request, sampling=replace(self._sampling, seed=group_seed(root, request.prefix)))
            for request in requests
        ]
        self._num_waiting = len(requests)
        retry = self._config.retry
        runner = EvalRunner(
            PinnedSource(self, version),
            keeper=StoreKeeper(self._store, eval_id),
            max_groups=max(1, max(1, self._config.inflight_groups * self._config.group_size) // size),
            retry=GroupRetry(retry.retried, retry.max_attempts, retry.backoff_s),
            version=version,
        )
        try:
            await runner.run(requests)
        except BaseException:
            async with transaction_soon(self._ledger.database):
                self._store.interrupt(eval_id)
            raise
        finally:
            self._num_waiting = 0
            self._pulse.fire()
        async with transaction_soon(self._ledger.database):
            self._end(eval_id, env, kind, version)

    def _begin(
        self, env: EnvConfig, kind: str, version: int, tasks: Sequence[EvalTask]
    ) -> tuple[int, dict[str, set[int]]]:
        """The evaluation's id, and what of it a run that was cut off has done already."""
        config, database = self._config.eval, self._ledger.database
        size = config.rollouts_per_example
        about = {
            "env_id": env.id, "env_args": env.args, "model": f"v{version}", "num_examples": len(tasks),
            "rollouts_per_example": size, "sampling_args": asdict(self._sampling),
        }  # fmt: skip
        plan = EvalPlan(kind, env.name, len(tasks), len(tasks) * size, version, f"v{version}", about)
        cut_off = [
            row
            for row in read_evals(database)
            if (row.kind, row.step, row.env_id) == (kind, version, env.name) and not row.is_finished
        ]
        if not cut_off:
            return self._store.begin(plan), {}
        eval_id = self._store.begin(plan, cut_off[-1].eval_id)
        done: dict[str, set[int]] = {}
        for row in rollout_rows(database, eval_id):
            if row.reward is not None:
                done.setdefault(example_key(row.example_id), set()).add(row.position)
        return eval_id, done

    def _end(self, eval_id: int, env: EnvConfig, kind: str, version: int) -> None:
        rows = rollout_rows(self._ledger.database, eval_id)
        tasks: dict[Any, list[RolloutRow]] = {}
        for row in rows:
            tasks.setdefault(row.example_id, []).append(row)
        estimate = mean_over_tasks([[r.reward for r in task if r.reward is not None] for task in tasks.values()])
        reward, interval = (estimate.mean, estimate.interval) if estimate is not None else (None, None)
        self._store.end(eval_id, mean=reward, interval=interval, metrics=eval_metrics(list(tasks.values())))
        mean = "none" if reward is None else f"{reward:.4g}"
        text = f"{kind} evaluation of v{version} on {env.name}: mean reward {mean} over {len(tasks)} tasks"
        logger.info("evaluated", extra={"kind": kind, "version": version, "env": env.name, "mean": reward})
        self._ledger.journal.event("orchestrator", "eval_finished", text, version=version, mean=reward)

    async def roll_out(
        self, request: GroupRequest, version: int, *, is_first: bool
    ) -> tuple[RolloutRecord, ...] | None:
        """One try at a group within its time; None when what came says nothing of `version`."""
        if is_first:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self._pulse.fire()
        incarnation = self._policy.incarnation
        self.num_open += 1
        try:
            async with asyncio.timeout(self._config.rollout_timeout_s):
                rollouts = await self._source.run_group(request)
        except TimeoutError:
            late = RolloutTimeout(f"took longer than rollout_timeout_s ({self._config.rollout_timeout_s:g})")
            rollouts = failed_rollouts(request, late)
        except Exception as error:
            rollouts = failed_rollouts(request, error)
        finally:
            self.num_open -= 1
        self.num_finished += 1
        self._pulse.fire()
        return None if await self._is_void(rollouts, version, incarnation) else rollouts

    async def wait_for_engine(self) -> None:
        """Until the engine serves again, and a moment longer."""
        while not self._policy.is_serving:
            await self._pulse.wait()
        await asyncio.sleep(self._config.retry.backoff_s)

    async def _is_void(self, rollouts: tuple[RolloutRecord, ...], version: int, incarnation: str) -> bool:
        """True when the rollouts say nothing of this version: the engine was gone, or served another one."""
        if any(r.error_kind == "provider" for r in rollouts):
            health = await self._updater.probe()
            if health is None or health.incarnation != incarnation:
                return True
        sampled = [r.version_range for r in rollouts if r.num_completion_tokens]
        return self._schedule.is_pinned and any(found != (version, version) for found in sampled)


class PinnedSource:
    """Rollouts of one policy version: a group that says nothing of it is rolled out again, however often."""

    def __init__(self, evaluator: Evaluator, version: int) -> None:
        self._evaluator = evaluator
        self._version = version
        self._begun: set[str] = set()

    async def run_group(self, request: GroupRequest) -> tuple[RolloutRecord, ...]:
        """Roll out one group. A rollout that fails is a record with `error_kind`."""
        while True:
            is_first = request.prefix not in self._begun
            self._begun.add(request.prefix)
            rollouts = await self._evaluator.roll_out(request, self._version, is_first=is_first)
            if rollouts is not None:
                return rollouts
            await self._evaluator.wait_for_engine()


def eval_metrics(tasks: Sequence[Sequence[RolloutRow]]) -> dict[str, float]:
    """Means of the rubric's metrics, shares of errors and truncation, and pass@k where rewards are 0 or 1."""
    rollouts = [rollout for task in tasks for rollout in task]
    parts: defaultdict[str, RunningMean] = defaultdict(RunningMean)
    for index, task in enumerate(tasks):
        for rollout in task:
            if rollout.reward is not None:
                for name, value in rollout.metrics.items():
                    parts[name].add(index, value)
    found = {f"reward_parts/{name}": running.mean for name, running in parts.items() if running.mean is not None}
    total = max(1, len(rollouts))
    found["error_rate"] = sum(r.error_kind is not None for r in rollouts) / total
    found["truncated_rate"] = sum(r.is_truncated for r in rollouts) / total
    found["tokens_mean"] = sum(r.num_tokens for r in rollouts) / total
    rewards = [[r.reward for r in task if r.reward is not None] for task in tasks]
    complete = [scores for scores, task in zip(rewards, tasks, strict=True) if len(scores) == len(task)]
    if complete and all(value <= 1e-6 or value >= SOLVED for scores in complete for value in scores):
        k = 1
        while k <= len(complete[0]):
            rates = [pass_at_k(len(scores), sum(value >= SOLVED for value in scores), k) for scores in complete]
            found[f"pass@{k}"] = mean_of(rates)
            k *= 2
    return found
