"""What the processes of a simulated run do: the real orchestrator, and in place of the others what they say and take.

Parts: `SimulatedPrograms` (by module), `EngineDoor` (the engine as the orchestrator and workers reach it),
`SimulatedRouter` (an engine of several replicas), `WorkedSource` (rollouts in worker processes). Each speaks to the
others only over `Life.ask`, so that a process that is stopped leaves them waiting, as a socket would.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from mettle.errors import MettleError, ProviderError
from mettle.evals.source import GroupRequest, failed_rollouts
from mettle.inference.client import ASK_TIMEOUT_S, UPDATE_TIMEOUT_S
from mettle.inference.engine.protocol import WeightUpdate
from mettle.orchestrator.__main__ import first_error
from mettle.orchestrator.loop import Orchestrator
from mettle.orchestrator.server import ServerHealth
from mettle.orchestrator.simulator import Killed, SimulatedEngine, SimulatedTrainer, SimulatedWorld
from mettle.processes.beats import Gauge
from mettle.processes.liveness import is_place, worker_name
from mettle.records.tasks import RolloutRecord
from mettle.records.tokens import Batch
from mettle.records.versions import WeightVersion
from mettle.runs.config import RunConfig
from mettle.runs.simulation.host import Life, Program, SimulatedHost, ended, until, write_endpoint
from mettle.runs.simulation.judging import JudgedRollouts, JudgeHabits
from mettle.runs.simulation.sandboxes import SandboxedSource, SandboxUsers, SimulatedBackend, run_service

BOOT_S: Final = 2.0
SEEK_S: Final = 0.5
WORKER_PAUSE_S: Final = 0.5
SILENCE_S: Final = 30.0


class _Served(Protocol):
    """What answers in an engine's process."""

    async def health(self) -> ServerHealth: ...

    async def update(self, weights: WeightVersion) -> WeightUpdate: ...

    async def sample(self, count: int, pause_s: float, share: float | None = None) -> list[int]: ...


class EngineDoor(SimulatedEngine):
    """The run's engine from outside its process: whichever life of it answers now."""

    def __init__(self, host: SimulatedHost, served: Mapping[int, _Served]) -> None:
        super().__init__(SimulatedWorld())
        self._host = host
        self._served = served

    def _now(self) -> tuple[Life, _Served]:
        life = self._host.living("inference")
        if life is None or life.pid not in self._served:
            raise ProviderError("no inference server has said where it listens")
        return life, self._served[life.pid]

    async def health(self) -> ServerHealth:
        """Raises: ProviderError as over HTTP."""
        life, served = self._now()
        found = await life.ask(served.health(), timeout_s=ASK_TIMEOUT_S)
        return ServerHealth(f"pid {life.pid}", found.version, found.load)

    async def update(self, weights: WeightVersion) -> WeightUpdate:
        """Raises: ProviderError as over HTTP."""
        life, served = self._now()
        return await life.ask(served.update(weights), timeout_s=UPDATE_TIMEOUT_S)

    async def sample(self, count: int, pause_s: float, share: float | None = None) -> list[int]:
        """Raises: ProviderError when the engine goes meanwhile."""
        life, served = self._now()
        return await life.ask(served.sample(count, pause_s, share))


@dataclass(slots=True)
class _Replica:
    life: Life
    engine: SimulatedEngine
    load: int = 0


class SimulatedRouter:
    """One engine of those that a cluster runs; a replica takes requests once it serves what the others serve."""

    def __init__(self, host: SimulatedHost, engines: Mapping[int, SimulatedEngine]) -> None:
        self._host = host
        self._engines = engines
        self._open: dict[int, _Replica] = {}
        self._weights: WeightVersion | None = None
        self._updating = asyncio.Lock()  # who is let in meanwhile would stay behind
        self.num_running = 0

    @property
    def num_tokens(self) -> int:
        """Of all replicas that there have been."""
        return sum(engine.num_tokens for engine in self._engines.values())

    async def keep(self) -> None:
        """Let replicas in when they can answer, and out when they are gone."""
        while True:
            for pid in [pid for pid, replica in self._open.items() if not replica.life.is_alive]:
                del self._open[pid]
            for life in [life for life in self._host.lives.values() if life.is_alive and life.pid in self._engines]:
                if life.pid not in self._open and not (life.is_frozen or life.is_blocked):
                    await self._admit(_Replica(life, self._engines[life.pid]))
            await asyncio.sleep(SEEK_S)

    async def _admit(self, replica: _Replica) -> None:
        async with self._updating:
            try:
                if self._weights is not None:
                    await replica.life.ask(replica.engine.update(self._weights), timeout_s=UPDATE_TIMEOUT_S)
            except MettleError:
                return
            self._open[replica.life.pid] = replica

    async def health(self) -> ServerHealth:
        """Raises: ProviderError when no replica is open."""
        if not self._open:
            raise ProviderError("no replica serves at the moment; they are being started")
        return ServerHealth("", 0 if self._weights is None else self._weights.version)

    async def update(self, weights: WeightVersion) -> WeightUpdate:
        """Have every open replica serve them; one that does not is let in again later."""
        async with self._updating:
            return await self._update(weights)

    async def _update(self, weights: WeightVersion) -> WeightUpdate:
        live = list(self._open.values())
        asked = [
            asyncio.ensure_future(replica.life.ask(replica.engine.update(weights), timeout_s=UPDATE_TIMEOUT_S))
            for replica in live
        ]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        for replica, outcome in zip(live, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self._open.pop(replica.life.pid, None)
        updates = [outcome for outcome in outcomes if isinstance(outcome, WeightUpdate)]
        if not updates:
            raise ProviderError(f"no replica took version {weights.version}")
        self._weights = weights
        return updates[0]

    async def sample(self, count: int, pause_s: float, share: float | None = None) -> list[int]:
        """On the replica that has least to do; on another one when that goes."""
        tried: set[int] = set()
        self.num_running += 1
        try:
            while True:
                free = [replica for pid, replica in self._open.items() if pid not in tried]
                if not free:
                    raise ProviderError("no replica can take the request now")
                replica = min(free, key=lambda replica: replica.load)
                replica.load += 1
                try:
                    return await replica.life.ask(replica.engine.sample(count, pause_s, share))
                except ProviderError:
                    tried.add(replica.life.pid)
                finally:
                    replica.load -= 1
        finally:
            self.num_running -= 1


class WorkedSource(SandboxedSource):
    """Rollouts in worker processes, which end with the orchestrator's and are replaced when they are gone.

    With `num_places` they are spread over so many places on a cluster's nodes, and end with those. What `judged` makes
    is rolled out and scored as by real environments.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        engine: SimulatedEngine,
        owner: Life,
        num_workers: int,
        num_places: int = 0,
        users: SandboxUsers | None = None,
        judged: JudgedRollouts | None = None,
    ) -> None:
        super().__init__(world, engine, users)
        self._owner = owner
        self._judged = judged
        self._share = -(-num_workers // num_places) if num_places else 0
        self._workers: dict[Life, list[int]] = {}
        for _ in range(num_workers):
            self._hire()
        owner.on_end.append(self._dismiss)

    async def run_group(self, request: GroupRequest) -> tuple[RolloutRecord, ...]:
        """In the worker that has least to do; lost with it."""
        await until(lambda: any(life.is_alive for life in self._workers))
        worker = min((life for life in self._workers if life.is_alive), key=lambda life: self._workers[life][0])
        try:
            return await worker.ask(self._in_worker(self._workers[worker], request))
        except ProviderError as error:
            return failed_rollouts(request, RuntimeError(f"the worker died: {error}"))

    async def _in_worker(self, counts: list[int], request: GroupRequest) -> tuple[RolloutRecord, ...]:
        """`counts` are the groups that the worker has, and has done."""
        counts[0] += 1
        try:
            return await (super().run_group(request) if self._judged is None else self._judged.run_group(request))
        finally:
            counts[0] -= 1
            counts[1] += 1

    def _hire(self) -> None:
        counts, place = [0, 0], None
        if self._share and (place := self._place()) is None:
            self._owner.host.loop.call_later(WORKER_PAUSE_S, self._hire_again)
            return

        async def work(life: Life) -> int:
            life.heart.tick_with(life.host.loop)
            try:
                await asyncio.Event().wait()
            finally:
                for others in (self.users, self._judged):
                    if others is not None:
                        await others.close(life)
            return 0

        node, environment = ("" if place is None else place.node), (place or self._owner).environment
        life = Life(self._owner.host, "worker", work, unit="rollouts", node=node, within=place, environment=environment)
        life.name = life.heart.name = worker_name("words", life.pid, "" if place is None else place.name)
        life.heart.gauge = lambda: Gauge(counts[1], counts[0] > 0)
        life.on_end.append(lambda: self._replace(life))
        self._workers[life] = counts
        if place is not None:
            self._owner.spawn(self._end_when_silent(life))

    def _place(self) -> Life | None:
        """The place that has the fewest workers, if one has room for another."""
        places = [one for one in self._owner.host.lives.values() if one.is_alive and one.is_open and is_place(one.name)]
        load = Counter(worker.within for worker in self._workers)
        place = min(places, key=lambda one: load[one], default=None)
        return None if place is None or load[place] >= self._share else place

    async def _end_when_silent(self, life: Life) -> None:
        """As a pool ends a worker that gives no sign of life: on a node, nobody else can."""
        silent_s = 0.0
        while life.is_alive:
            await asyncio.sleep(1.0)
            silent_s = silent_s + 1.0 if life.is_frozen else 0.0
            if silent_s > SILENCE_S:
                life.end(-9)

    def _replace(self, life: Life) -> None:
        del self._workers[life]
        if self._owner.is_alive:
            self._owner.host.loop.call_later(WORKER_PAUSE_S, self._hire_again)

    def _hire_again(self) -> None:
        if self._owner.is_alive:
            self._hire()

    def _dismiss(self) -> None:
        for life in list(self._workers):
            life.end(-9)


class SimulatedPrograms:
    """The programs of one run, over all of its lives. `batches` are those that were trained, by step."""

    def __init__(
        self,
        config: RunConfig,
        world: SimulatedWorld,
        host: SimulatedHost,
        *,
        num_workers: int = 2,
        judge: JudgeHabits | None = None,
    ) -> None:
        self._config = config
        self._judge = judge
        self._world = world
        self._host = host
        self._num_workers = num_workers
        self._engines: dict[int, SimulatedEngine] = {}
        self._served: dict[int, _Served] = {}
        self.batches: dict[int, Batch] = {}
        self.num_trainings = 0
        has_services = bool(config.deployment.ray.num_sandbox_services)
        self._users = SandboxUsers(host, random.Random(world.pace_seed)) if has_services else None
        self.services: list[tuple[str, str, SimulatedBackend]] = []
        """Name and node of each life of a sandbox service, and where its machines are."""

    def here(self) -> dict[str, tuple[Program, str]]:
        """By module, with what each counts: of the supervisor's own machine."""
        engine = self.route if self._config.deployment.engine == "ray" else self.serve
        return {
            "mettle.orchestrator": (self.orchestrate, "rollouts"),
            "mettle.trainer": (self.train, "micro batches"),
            "mettle.inference": (engine, "steps"),
        }

    def on_nodes(self) -> dict[str, Program]:
        """By module: of a cluster's nodes."""
        return {
            "mettle.trainer": self.train,
            "mettle.inference": self.serve,
            "mettle.envs.workers.place": self.place,
            "mettle.runs.cluster.sandboxes": self.keep_sandboxes,
        }

    async def orchestrate(self, life: Life) -> int:
        """The real orchestrator, as its process runs it."""
        await asyncio.sleep(BOOT_S)
        ledger = self._host.ledger(life)
        door = EngineDoor(self._host, self._served)
        places = self._config.deployment.ray.num_worker_places
        source = WorkedSource(self._world, door, life, self._num_workers, places, self._users, self._judged(door))
        try:
            orchestrator = Orchestrator(
                self._config.orchestrator, self._host.run_dir, ledger, source, door, heart=life.heart
            )
            await orchestrator.run()
        except (MettleError, BaseExceptionGroup) as raised:
            return _exit_code(life, raised)
        finally:
            ledger.close()
        return 0

    def _judged(self, door: EngineDoor) -> JudgedRollouts | None:
        if self._judge is None:
            return None
        config = self._config.orchestrator
        names = [env.name for env in (*config.envs, *config.eval_envs)]
        return JudgedRollouts(self._judge, self._world, door, self._host, names, config.rollout_timeout_s)

    async def train(self, life: Life) -> int:
        """Rank 0 trains while the others move; they are there, and beat."""
        await asyncio.sleep(BOOT_S)
        if life.name != "trainer":
            life.heart.gauge = lambda: Gauge(0, has_work=False)
            await until(lambda: (first := self._host.living("trainer")) is None or first.name != "trainer", 1.0)
            return 0
        ledger = self._host.ledger(life)
        others = [f"trainer-{rank}" for rank in range(1, self._config.deployment.num_trainer_ranks)]

        def is_held() -> bool:
            ranks = [self._host.living(name) for name in others]
            return any(rank is None or rank.is_frozen or rank.is_blocked for rank in ranks)

        async def compute(seconds: float) -> None:
            await asyncio.sleep(seconds)
            await until(lambda: not is_held())

        trainer = SimulatedTrainer(
            self._world, self._host.run_dir, ledger, self._config.max_steps, self.batches, heart=life.heart,
            compute=compute,
        )  # fmt: skip
        try:
            await trainer.run()
        except (MettleError, BaseExceptionGroup) as raised:
            return _exit_code(life, raised)
        finally:
            self.num_trainings += trainer.num_trainings
            ledger.close()
        return 0

    async def serve(self, life: Life) -> int:
        """An engine."""
        await asyncio.sleep(BOOT_S)
        engine = self._engines[life.pid] = SimulatedEngine(self._world)
        if life.name == "inference":
            self._served[life.pid] = engine
        life.heart.gauge = lambda: Gauge(engine.num_tokens, engine.num_sampling > 0)
        life.heart.tick_with(self._host.loop)
        write_endpoint(self._host.run_dir.endpoint(life.name), life.pid)
        await asyncio.Event().wait()
        return 0

    async def place(self, life: Life) -> int:
        """Where workers are started."""
        await asyncio.sleep(BOOT_S)
        life.heart.gauge = lambda: Gauge(0, has_work=False)
        life.is_open = True
        write_endpoint(self._host.run_dir.endpoint(life.name), life.pid)
        await asyncio.Event().wait()
        return 0

    async def keep_sandboxes(self, life: Life) -> int:
        """Where sandboxes are made."""
        await asyncio.sleep(BOOT_S)
        backend = SimulatedBackend()
        self.services.append((life.name, life.node, backend))
        return await run_service(life, backend)

    async def route(self, life: Life) -> int:
        """A server before the engines of a cluster, which answers once one of them does."""
        await asyncio.sleep(BOOT_S)
        router = SimulatedRouter(self._host, self._engines)
        keeping = life.spawn(router.keep())
        try:
            while True:
                try:
                    await router.health()
                except ProviderError:
                    await asyncio.sleep(SEEK_S)
                else:
                    break
            self._served[life.pid] = router
            life.heart.gauge = lambda: Gauge(router.num_tokens, router.num_running > 0)
            life.heart.tick_with(self._host.loop)
            write_endpoint(self._host.run_dir.endpoint(life.name), life.pid)
            await asyncio.Event().wait()
        finally:
            keeping.cancel()
            await ended(keeping)
        return 0


def _exit_code(life: Life, raised: BaseException) -> int:
    """As a process of a run ends: its reason as the last line."""
    error = first_error(raised)
    if isinstance(error, Killed):
        raise error from raised  # alone, also where it came up in a group of tasks
    if not life.is_alive or not isinstance(error, MettleError):
        raise raised
    life.said = str(error)
    return error.exit_code
