"""Histories of whole runs in simulated time: a run, what befalls it, and what its supervisor made of that.

    History (a function of its number)   config, speeds, faults with their times, nodes
      │ live_through
      ▼
    the real supervisor, watchdog, launchers, placement, orchestrator and ledger on a `SimulatedHost`
      │
      ▼
    Lived   what was told of whom and when, how each life of the supervisor ended, the batches that were trained

A run that ends with a reason is resumed when what ended it is over, as a person would do. Invariant: a history is a
function of its number; one that does not end in `max_lives` lives or `limit_s` is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from mettle.errors import StorageError, UserError
from mettle.orchestrator.simulator import SimulatedWorld
from mettle.processes.beats import Heartbeat
from mettle.processes.virtual_time import Deadlock
from mettle.records.tokens import Batch
from mettle.runs.cluster.launcher import RayLauncher
from mettle.runs.cluster.placement import placement_of
from mettle.runs.cluster.sandboxes import write_settings
from mettle.runs.config import RunConfig
from mettle.runs.launch import process_specs
from mettle.runs.launcher import Launcher
from mettle.runs.recorder import JournalThread
from mettle.runs.simulation.cluster import SimulatedCluster, SimulatedNode
from mettle.runs.simulation.host import HostLoop, Life, SimulatedHost, SimulatedLauncher, until
from mettle.runs.simulation.judging import JUDGE, JudgeHabits, SimulatedJudge
from mettle.runs.simulation.programs import SimulatedPrograms
from mettle.runs.supervisor import Supervisor
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

FaultKind = Literal[
    "frozen",
    "blocked",
    "killed",
    "node_lost",
    "node_joins",
    "disk_full",
    "clock_jump",
    "suspended",
    "refusing",
    "babbling",
]
LASTING: Final = float("inf")
TICK_S: Final = 0.4
PERSON_S: Final = 30.0
"""How long somebody takes to resume a run that has ended."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """`kind` befalls `target` (a process's name, or a node's) at `at`, for `for_s`; a clock is set by so much.

    A judge that was killed is back after `for_s`: somebody else looks after it.
    """

    kind: FaultKind
    target: str
    at: float
    for_s: float = LASTING

    @property
    def until(self) -> float:
        return self.at + self.for_s


@dataclass(frozen=True, slots=True)
class History:
    """A run and what befalls it."""

    config: RunConfig
    world: SimulatedWorld
    faults: tuple[InjectedFault, ...] = ()
    nodes: tuple[SimulatedNode, ...] = ()
    num_workers: int = 2
    max_lives: int = 8
    judge: JudgeHabits | None = None
    """Rollouts are scored by a judge model, and on a cluster with sandbox services by tests as well."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the supervisor said of a process, at a simulated time."""

    at: float
    kind: str
    text: str
    process: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that has befallen somebody: which process it was then."""

    fault: InjectedFault
    at: float
    process: str
    pid: int


@dataclass(slots=True)
class Lived:
    """What came of a history."""

    told: list[Told] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    ended_at: dict[int, float] = field(default_factory=dict)
    """When the process of a pid ended, of those that were struck."""
    endings: list[tuple[float, str | None]] = field(default_factory=list)
    """Of each life of the supervisor: when it ended, and why if it was not the end of the run."""
    left_behind: list[str] = field(default_factory=list)
    """Processes that were there when a supervisor had ended."""
    crashes: list[BaseException] = field(default_factory=list)
    batches: dict[int, Batch] = field(default_factory=dict)
    num_trainings: int = 0
    sandboxes: list[tuple[str, str, int]] = field(default_factory=list)
    """Of each life of a sandbox service: its name, its node, and how many of its machines ran a command."""
    duration_s: float = 0.0


class _InPlaceRecorder(JournalThread):
    """Writes at once: a thread of its own has no place on a virtual clock."""

    def start(self) -> None:
        """Nothing to start."""

    def put(self, write: Callable[[], None]) -> None:
        self._do(write)

    def again(self) -> None:
        self._write_held()

    def close(self, timeout_s: float) -> None:
        """Everything is written."""


def live_through(history: History, root: Path) -> Lived:
    """Play a history in the folder of a run.

    Raises: Deadlock when it does not end.
    """
    with asyncio.Runner(loop_factory=HostLoop) as runner:
        return runner.run(_Player(history, root).play())


class _Player:
    def __init__(self, history: History, root: Path) -> None:
        self._history = history
        self._run_dir = run_dir = RunDir(root)
        for folder in (run_dir.beats, run_dir.logs, run_dir.endpoint("x").parent):
            folder.mkdir(parents=True, exist_ok=True)
        if history.config.deployment.ray.num_sandbox_services:
            write_settings(run_dir, history.config.deployment.ray)
        self.lived = Lived()
        self._cluster: SimulatedCluster | None = None

    async def play(self) -> Lived:
        history, lived = self._history, self.lived
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostLoop), "a history has a clock of its own"
        host = self._host = SimulatedHost(self._run_dir, loop)
        self._programs = SimulatedPrograms(
            history.config, history.world, host, num_workers=history.num_workers, judge=history.judge
        )
        if history.judge is not None:
            self._judge = SimulatedJudge(history.judge, host, history.world.seed)
            self._judge.start()
        others = [asyncio.create_task(host.beat_for_ever()), asyncio.create_task(self._befall())]
        try:
            async with asyncio.timeout(history.world.limit_s):
                for _ in range(history.max_lives):
                    reason = await self._supervise()
                    lived.endings.append((loop.time(), reason))
                    if reason is None:
                        break
                    await asyncio.sleep(max(PERSON_S, self._faults_over_at - loop.time()))
                else:
                    raise Deadlock(f"not finished after {history.max_lives} lives: {lived.endings}")
        except TimeoutError as error:
            raise Deadlock(f"not finished after {history.world.limit_s:.0f} s: {lived.told[-5:]}") from error
        finally:
            for life in list(host.lives.values()):
                life.end(-9)  # what is stopped for ever would keep the loop from ending
            for task in others:
                task.cancel()
            for result in await asyncio.gather(*others, return_exceptions=True):
                if isinstance(result, Exception):
                    lived.crashes.append(result)
            lived.crashes += host.errors
        lived.batches, lived.num_trainings = self._programs.batches, self._programs.num_trainings
        lived.sandboxes = [(name, node, backend.num_used) for name, node, backend in self._programs.services]
        lived.duration_s = loop.time()
        return lived

    @property
    def _faults_over_at(self) -> float:
        """When what passes by itself has passed."""
        return max((f.until for f in self._history.faults if f.for_s < LASTING and f.kind != "clock_jump"), default=0.0)

    # The supervisor

    async def _supervise(self) -> str | None:
        """One life of the supervisor; why it ended, None at the end of the run."""
        reason: list[str | None] = []

        async def drive(life: Life) -> int:
            self._host.supervisor_pid = life.pid
            reason.append(await self._drive())
            return 0

        life = Life(self._host, "supervisor", drive)
        await until(lambda: not life.is_alive, 1.0)
        for other in list(self._host.lives.values()):
            if other.is_alive and not other.is_outside:
                self.lived.left_behind.append(other.name)
                other.end(-9)
        if not reason:
            raise Deadlock(f"the supervisor ended by itself: {self._host.errors}")
        return reason[0]

    async def _drive(self) -> str | None:
        host, config = self._host, self._history.config
        ledger = host.ledger()
        try:
            supervisor = Supervisor(
                self._run_dir, ledger, process_specs(self._run_dir, config, is_warm=True), main="orchestrator",
                launcher=self._launcher(), machine=host, recorder=_InPlaceRecorder,
                heart=Heartbeat(name="supervisor", unit="ticks", clock=host.now),
                max_restarts=config.deployment.max_restarts,
            )  # fmt: skip
            seen = ledger.journal.newest_event_id()
            for _ in supervisor.ticks():
                seen = self._note(ledger, seen)
                await asyncio.sleep(TICK_S)
            self._note(ledger, seen)
            return supervisor.failure
        except (UserError, StorageError) as error:
            return str(error)
        finally:
            ledger.close()

    def _launcher(self) -> Launcher:
        beside = SimulatedLauncher(self._host, self._programs.here())
        if self._history.config.deployment.engine == "local":
            return beside
        placement = placement_of(self._history.config)
        ray = self._history.config.deployment.ray
        self._cluster = SimulatedCluster(ray, self._nodes(), placement, self._host, self._programs.on_nodes())
        self._host.loop.create_task(self._cluster.beat_for_ever())
        return RayLauncher(self._cluster, placement, self._run_dir, beside=beside, machine=self._host)

    def _nodes(self) -> Sequence[SimulatedNode]:
        return self._cluster.nodes if self._cluster is not None else self._history.nodes

    def _note(self, ledger: Ledger, seen: int) -> int:
        for event in ledger.journal.events(after_id=seen):
            seen = event.event_id
            if event.source == "supervisor":
                process, cause = str(event.data.get("process", "")), str(event.data.get("cause", ""))
                self.lived.told.append(Told(event.at, event.kind, event.message, process, cause))
        return seen

    # What befalls the run

    async def _befall(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for fault in self._history.faults:
                tasks.create_task(self._strike(fault))

    async def _strike(self, fault: InjectedFault) -> None:
        host = self._host
        await asyncio.sleep(fault.at)
        match fault.kind:
            case "disk_full":
                host.is_disk_full = True
                await asyncio.sleep(fault.for_s)
                host.is_disk_full = False
            case "clock_jump":
                host.jumped_s += fault.for_s
            case "suspended":
                host.loop.pass_over(fault.for_s)
                self.lived.struck.append(Struck(fault, fault.at, "", 0))
            case "node_lost":
                await self._lose_node(fault)
            case "node_joins":
                await until(lambda: self._cluster is not None, 1.0)
                self._node(fault.target).is_there = True
            case "refusing" | "babbling":
                self._judge.mood = fault.kind
                self.lived.struck.append(Struck(fault, fault.at, JUDGE, 0))
                await asyncio.sleep(fault.for_s)
                self._judge.mood = ""
            case _:
                await self._strike_process(fault)
                if fault.target == JUDGE and fault.kind == "killed":
                    await asyncio.sleep(fault.for_s)
                    self._judge.start()

    async def _lose_node(self, fault: InjectedFault) -> None:
        await until(lambda: self._cluster is not None, 1.0)
        assert self._cluster is not None, "it was waited for"
        self._cluster.lose(fault.target)
        if fault.for_s < LASTING:
            await asyncio.sleep(fault.for_s)
            self._node(fault.target).is_there = True

    def _node(self, name: str) -> SimulatedNode:
        return next(node for node in self._nodes() if node.name == name)

    async def _strike_process(self, fault: InjectedFault) -> None:
        life = self._host.living(fault.target)
        if life is None or (fault.kind != "killed" and (life.is_frozen or life.is_blocked)):
            return
        self.lived.struck.append(Struck(fault, self._host.now(), life.name, life.pid))
        life.on_end.append(lambda: self.lived.ended_at.setdefault(life.pid, self._host.now()))
        if fault.kind == "killed":
            life.end(-9)
            return
        life.freeze() if fault.kind == "frozen" else life.block()
        if fault.for_s < LASTING:
            await asyncio.sleep(fault.for_s)
            if life.is_alive:
                life.go_on()
