"""A whole run in a second: the real orchestrator and ledger with a simulated engine, trainer and environment.

Parts: `SimulatedEngine`, `SimulatedSource`, `SimulatedTrainer`, `Mortality` (kills the orchestrator at a given
transaction or moment), `simulate`, which wants the loop of `mettle.processes.virtual_time`. Everything random comes
from one seed, so a failure repeats. What the orchestrator promises is checked by whoever reads the ledger afterwards.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mettle.errors import ProviderError
from mettle.evals.source import GroupRequest
from mettle.inference.engine.protocol import WeightsRejected, WeightUpdate
from mettle.orchestrator.concurrency import EngineLoad
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.loop import Orchestrator
from mettle.orchestrator.server import ServerHealth
from mettle.processes.beats import Heartbeat
from mettle.processes.virtual_time import TICK_S, Deadlock
from mettle.records.tasks import RolloutRecord, Turn
from mettle.records.tokens import Batch
from mettle.records.versions import CanaryCheck, WeightVersion
from mettle.storage.batches import read_batch
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

BATCH_BUDGET_S = 600.0
"""The trainer's own default for the wait for a batch."""


class Killed(BaseException):
    """The orchestrator died here, as by kill -9."""


@dataclass(frozen=True)
class MeasuredPace:
    """Measured times of rollouts, in place of invented ones.

    One of n that run on an engine spends (`base_s` + `each_s` n) x a share in the model, then one of `other_s` outside
    of it (tools, judges). Shares, whose mean is 1, and `other_s` are drawn as pairs. `num_engines` take equal parts.
    """

    shares: tuple[float, ...]
    base_s: float
    each_s: float
    other_s: tuple[float, ...]
    num_engines: int = 1

    def draw(self, luck: random.Random) -> tuple[float, float]:
        """(share of the model's time, seconds outside of it) of a rollout."""
        index = luck.randrange(len(self.shares))
        return self.shares[index], self.other_s[index % len(self.other_s)]

    def token_s(self, num_running: int, num_tokens: int) -> float:
        """Of one of `num_tokens` equal parts of a rollout while so many rollouts run on all engines."""
        return (self.base_s + self.each_s * max(1.0, num_running / self.num_engines)) / num_tokens


@dataclass(frozen=True)
class SimulatedWorld:
    """How fast and how reliable everything is. Times are simulated seconds."""

    seed: int = 0
    pace_seed: int = 0
    """How long each rollout takes is drawn from this, what comes of it from `seed` and the request's own."""
    num_tasks: int = 40
    rollout_s: float = 1.0
    """Mean time of a model call of four tokens; each rollout draws its own."""
    pace: MeasuredPace | None = None
    """Measured times in place of `rollout_s` and `straggler_rate`."""
    train_s: float = 1.0
    update_s: float = 0.05
    error_rate: float = 0.0
    """Share of rollouts that fail in the environment."""
    equal_rate: float = 0.0
    """Share of groups whose rewards are all equal."""
    engine_deaths: tuple[float, ...] = ()
    """When the engine dies; it comes back with v0 after `engine_down_s`."""
    engine_down_s: float = 3.0
    """0 is a restart that nobody notices but by asking: for a while it samples with v0."""
    straggler_rate: float = 0.0
    """Share of rollouts that take ten times as long."""
    kv_groups: int | None = None
    """Groups that the engine's memory holds; more of them preempt each other and take twice as long. None: any."""
    trainer_deaths: tuple[int, ...] = ()
    """After which steps the trainer falls back to its last checkpoint."""
    checkpoint_every: int = 2
    refusals: int = 0
    """How many updates the engine refuses before it takes one."""
    kills_at_transaction: tuple[int, ...] = ()
    """The n-th life of the orchestrator ends at this transaction; odd numbers after the commit, even ones before."""
    kills_at: tuple[float, ...] = ()
    """Times at which the orchestrator dies wherever it is."""
    limit_s: float = 20_000.0


class SimulatedEngine:
    """Serves a version, takes another one after a while, dies on schedule and comes back with v0."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._num_refusals = world.refusals
        self.version = 0
        self.life = 0
        self.is_up = True
        self.num_updates = 0
        self.num_running = self.num_preempted = 0
        self.num_sampling = 0
        self.num_tokens = 0
        self.busy_s = 0.0
        """Simulated seconds in which an engine had a rollout, added up over the engines."""
        self._counted_to = 0.0

    @property
    def is_crowded(self) -> bool:
        """True while more groups run than fit."""
        return self._world.kv_groups is not None and self.num_running > self._world.kv_groups

    async def live_and_die(self) -> None:
        """Follow the schedule of deaths."""
        loop = asyncio.get_running_loop()
        for moment in sorted(self._world.engine_deaths):
            await asyncio.sleep(max(0.0, moment - loop.time()))
            self.is_up = False
            await asyncio.sleep(self._world.engine_down_s)
            self.version = 0
            self.life += 1
            self.is_up = True

    async def health(self) -> ServerHealth:
        """Its life and version."""
        await asyncio.sleep(0)
        self._demand_life(self.life)
        return ServerHealth(f"life-{self.life}", self.version, self._load())

    def _load(self) -> EngineLoad | None:
        """A group takes one byte."""
        if self._world.kv_groups is None:
            return None
        fitting = min(self.num_running, self._world.kv_groups)
        return EngineLoad(fitting, self.num_running - fitting, fitting, self._world.kv_groups, self.num_preempted)

    async def update(self, weights: WeightVersion) -> WeightUpdate:
        """Serve other weights after `update_s`."""
        life = self.life
        self._demand_life(life)
        await asyncio.sleep(self._world.update_s)
        self._demand_life(life)
        if self._num_refusals:
            self._num_refusals -= 1
            raise WeightsRejected(f"the canary of v{weights.version} does not match")
        self.version = weights.version
        self.num_updates += 1
        return WeightUpdate(
            weights.version, 0.0, self._world.update_s * 1000.0, CanaryCheck(weights.version, 0.0, 0.0, 64)
        )

    async def sample(self, count: int, pause_s: float, share: float | None = None) -> list[int]:
        """The versions that sampled `count` tokens, at `pause_s` each or, given a share, at the measured pace.

        Raises: ProviderError when it dies meanwhile.
        """
        self._count(1)
        try:
            return await self._sample(count, pause_s, share)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        """One rollout more or fewer is in the model; they are spread evenly over the engines."""
        now = asyncio.get_running_loop().time()
        num_engines = self._world.pace.num_engines if self._world.pace else 1
        self.busy_s += (now - self._counted_to) * min(self.num_sampling, num_engines)
        self._counted_to = now
        self.num_sampling += change

    async def _sample(self, count: int, pause_s: float, share: float | None) -> list[int]:
        life = self.life
        versions = []
        for _ in range(count):
            self._demand_life(life)
            versions.append(self.version)
            self.num_tokens += 1
            self.num_preempted += self.is_crowded
            if share is not None:
                assert self._world.pace is not None, "a share is one of a measured pace"
                await asyncio.sleep(share * self._world.pace.token_s(self.num_sampling, count))
            elif pause_s:
                await asyncio.sleep(pause_s * 2 if self.is_crowded else pause_s)
        return versions

    async def close(self) -> None:
        """Nothing to close."""

    def _demand_life(self, life: int) -> None:
        if not self.is_up or self.life != life:
            raise ProviderError("connection refused: the engine is gone")


class SimulatedSource:
    """Environments with `world.num_tasks` rows each. Every sampled token is the id of its task draw."""

    NUM_TOKENS = 4

    def __init__(self, world: SimulatedWorld, engine: SimulatedEngine) -> None:
        self._world = world
        self._engine = engine
        self._num_calls = 0

    def num_tasks(self, env: str, *, is_eval: bool = False) -> int:
        """The same for every environment."""
        return self._world.num_tasks

    def uid(self, env: str, example_id: int, *, is_eval: bool = False) -> str:
        """Its number."""
        return f"{env}-{example_id}"

    def provides_advantages(self, env: str) -> bool:
        """They have rewards alone."""
        return False

    def figures(self) -> dict[str, float]:
        """None: they run here."""
        return {}

    async def run_group(self, request: GroupRequest) -> tuple[RolloutRecord, ...]:
        """Roll out one group: with luck from the request's seed, as an engine samples, and at a speed of each time."""
        self._num_calls += 1
        luck = random.Random(f"{self._world.seed}/{request.sampling.seed}")
        pace = random.Random(f"{self._world.pace_seed}/{request.prefix}/{self._num_calls}")
        is_equal = luck.random() < self._world.equal_rate
        self._engine.num_running += 1
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        self._rollout(request, position, random.Random(luck.random()), self._pause_s(pace), is_equal)
                    )
                    for position in range(request.size)
                ]
        finally:
            self._engine.num_running -= 1
        return tuple(task.result() for task in running)

    async def close(self) -> None:
        """Nothing to close."""

    def _pause_s(self, pace: random.Random) -> float:
        """Before each token of a rollout."""
        pause_s = pace.expovariate(1.0) * self._world.rollout_s / self.NUM_TOKENS if self._world.rollout_s else 0.0
        return pause_s * 10.0 if pace.random() < self._world.straggler_rate else pause_s

    async def _rollout(
        self, request: GroupRequest, position: int, luck: random.Random, pause_s: float, is_equal: bool
    ) -> RolloutRecord:
        name = f"{request.prefix}-{position}"
        try:
            if self._world.pace is None:
                versions = await self._engine.sample(self.NUM_TOKENS, pause_s)
            else:
                share, other_s = self._world.pace.draw(luck)
                versions = await self._engine.sample(self.NUM_TOKENS, 0.0, share)
                await asyncio.sleep(other_s)
        except ProviderError as error:
            return RolloutRecord(name, None, {}, [], (), error_kind="provider", error=str(error))
        if luck.random() < self._world.error_rate:
            return RolloutRecord(name, None, {}, [], (), error_kind="environment", error="the tool broke")
        mark = int(request.prefix[1:]) if not request.is_eval else 0
        turn = Turn(
            0,
            np.array([7, 8], np.int32),
            np.full(self.NUM_TOKENS, mark, np.int32),
            np.full(self.NUM_TOKENS, -0.5, np.float32),
            np.array(versions, np.int32),
        )
        reward = 0.5 if is_equal else (position % 2) * 0.5 + luck.random() * 0.1
        return RolloutRecord(name, reward, {"luck": reward}, [{"role": "user", "content": "go"}], (turn,))


@dataclass(repr=False)
class SimulatedTrainer:
    """Trains what is shipped, publishes, and falls back to its checkpoint when it dies."""

    world: SimulatedWorld
    run_dir: RunDir
    ledger: Ledger
    max_steps: int
    batches: dict[int, Batch] = field(default_factory=dict)
    num_trainings: int = 0
    heart: Heartbeat = field(default_factory=lambda: Heartbeat(name="trainer"))
    compute: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Passes the seconds of a step."""

    async def run(self) -> None:
        """Until the last step is trained, from the newest checkpoint on."""
        deaths = list(self.world.trainer_deaths)
        trained = max((row.step for row in self.ledger.batches() if row.trainings), default=0)
        step = self._restart(trained // self.world.checkpoint_every * self.world.checkpoint_every)
        while step <= self.max_steps:
            digest = await self._next(step)
            self.batches[step] = read_batch(self.run_dir.batches, digest)
            await self.compute(self.world.train_s)
            self.ledger.record_trained(step, _weights(step), self.batches[step].draw_ids)
            self.num_trainings += 1
            self.heart.advance()
            if step in deaths:
                deaths.remove(step)
                await asyncio.sleep(1.0)
                step = self._restart(step // self.world.checkpoint_every * self.world.checkpoint_every)
                continue
            step += 1

    async def _next(self, step: int) -> str:
        """The batch of a step, once it is there."""
        awaits = f"orchestrator ships step {step}"
        with self.heart.waiting("trainer", "batch", "orchestrator", awaits, budget_s=BATCH_BUDGET_S):
            while (row := self.ledger.batch(step)) is None:
                self.heart.tick()
                await asyncio.sleep(0.05)
        self.heart.rest()
        return row.digest

    def _restart(self, checkpoint: int) -> int:
        self.ledger.publish(_weights(checkpoint))
        return checkpoint + 1


class Mortality:
    """Stands between the orchestrator and its ledger, and ends it at a transaction or on demand."""

    def __init__(self, ledger: Ledger, at_transaction: int | None) -> None:
        self._at = at_transaction
        self._count = 0
        self._depth = 0
        self.is_dead = False
        self.running: asyncio.Task[None] | None = None
        self._transaction = ledger.database.transaction
        # Every write of the ledger goes through this one method.
        ledger.database.transaction = self.transaction  # type: ignore[method-assign]

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """The ledger's own, unless death comes before or after it."""
        if self.is_dead:
            raise Killed
        if self._depth:
            with self._transaction() as connection:
                yield connection
            return
        self._count += 1
        is_last = self._count == self._at
        if is_last and self._count % 2 == 0:
            self._die()
        self._depth += 1
        try:
            with self._transaction() as connection:
                yield connection
        finally:
            self._depth -= 1
        if is_last:
            self._die()

    def _die(self) -> NoReturn:
        """End whoever writes, and all the rest: a callback of the loop would take its own death along and no other."""
        self.is_dead = True
        if self.running is not None:
            asyncio.get_running_loop().call_soon(self.running.cancel)
        raise Killed


@dataclass(frozen=True, repr=False)
class Simulated:
    """What a simulated run leaves behind, besides its directory."""

    engine: SimulatedEngine
    trainer: SimulatedTrainer
    num_lives: int
    duration_s: float


async def simulate(root: Path, config: OrchestratorConfig, world: SimulatedWorld) -> Simulated:
    """Run to the end, starting the orchestrator again after each death."""
    run_dir = RunDir(root)
    loop = asyncio.get_running_loop()
    engine = SimulatedEngine(world)
    trainer_ledger = Ledger(run_dir.ledger, clock=loop.time)
    trainer = SimulatedTrainer(world, run_dir, trainer_ledger, config.max_steps)
    others = [asyncio.create_task(trainer.run()), asyncio.create_task(engine.live_and_die())]
    kills, num_lives = list(world.kills_at_transaction), 0
    waits: list[str] = []
    heart = Heartbeat(name="orchestrator", clock=loop.time)
    loop.call_later(world.limit_s - TICK_S, _note_waits, heart, waits)
    try:
        async with asyncio.timeout(world.limit_s):
            while trainer_ledger.journal.fact("state") != "finished":
                num_lives += 1
                at = kills.pop(0) if kills else None
                await _live_once(config, run_dir, world, engine, heart, at)
            for task in others:
                if task.done():
                    task.result()
    except TimeoutError as error:
        graph = "; ".join(waits) or "none"
        raise Deadlock(f"not finished after {world.limit_s:.0f} simulated s; waits: {graph}") from error
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        trainer_ledger.close()
    return Simulated(engine, trainer, num_lives, loop.time())


async def _live_once(
    config: OrchestratorConfig,
    run_dir: RunDir,
    world: SimulatedWorld,
    engine: SimulatedEngine,
    heart: Heartbeat,
    at_transaction: int | None,
) -> None:
    """One life of the orchestrator: to the end of the run, or to its death."""
    loop = asyncio.get_running_loop()
    ledger = Ledger(run_dir.ledger, clock=loop.time)
    mortality = Mortality(ledger, at_transaction)
    upcoming = [moment for moment in sorted(world.kills_at) if moment > loop.time()]
    try:
        orchestrator = Orchestrator(config, run_dir, ledger, SimulatedSource(world, engine), engine, heart=heart)
        running = mortality.running = asyncio.create_task(orchestrator.run())
        if upcoming:
            loop.call_at(upcoming[0], _kill, mortality, running)
        await running
    except (Killed, asyncio.CancelledError, BaseExceptionGroup):
        if not mortality.is_dead:
            raise
    finally:
        ledger.close()


def _kill(mortality: Mortality, running: asyncio.Task[None]) -> None:
    if not running.done():
        mortality.is_dead = True
        running.cancel()


def _note_waits(heart: Heartbeat, waits: list[str]) -> None:
    waits += [f"{wait.owner} on {wait.edge} for {wait.awaits}" for wait in heart.waits]


def _weights(version: int) -> WeightVersion:
    return WeightVersion(version, f"weights/v{version}", f"digest-{version}")
