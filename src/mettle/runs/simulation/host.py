"""A machine in simulated time: processes that can be frozen, blocked and killed, a disk, two clocks.

Parts: `HostLoop` (a virtual clock on which a process can be stopped, with sockets between processes), `SimulatedHost`
(a `HostMachine`), `Life` (a process from its start to its end), `SimulatedProcess` and `SimulatedLauncher` (what a
supervisor needs of them).

A process is whatever runs in its context: what it has started, too. While it is stopped none of its callbacks run; they
run late when it goes on, as after SIGSTOP. Frozen, it does not beat either; blocked, its heart beats on and says so.
Invariant: what was killed writes nothing any more and answers nobody.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import heapq
import json
import signal
from asyncio import events
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from mettle.errors import ProviderError, StorageError
from mettle.orchestrator.simulator import Killed
from mettle.processes.beats import HEART, Beat, Heartbeat, write_beat
from mettle.processes.managed import ProcessSpec
from mettle.processes.ready_file import ReadyFile
from mettle.processes.virtual_time import VirtualTimeLoop
from mettle.runs.host import HostNews
from mettle.runs.launcher import SupervisedProcess
from mettle.runs.simulation.network import SimulatedListener, SimulatedNetwork
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

T = TypeVar("T")

FIRST_PID: Final = 100_000_000
"""Above every pid that a kernel gives, so that nobody is found under one of these."""
BEAT_S: Final = 1.0
OPENED_S: Final = 1.6e9
_PROCESS: contextvars.ContextVar[int] = contextvars.ContextVar("simulated_process", default=0)


class _Handle(events.Handle):
    """A callback that waits while its process is stopped."""

    __slots__ = ()

    def _run(self) -> None:
        if not self._loop.holds(self):  # type: ignore[attr-defined]
            super()._run()


class _TimerHandle(events.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        if not self._loop.holds(self):  # type: ignore[attr-defined]
            super()._run()


class HostLoop(VirtualTimeLoop):
    """A virtual clock for several processes, each of which can be stopped for itself.

    A process that listens is reached at the path `/PID`, whatever the socket that it listens on, or by a name that the
    network has for it.
    """

    def __init__(self) -> None:
        self._stopped: dict[int, list[events.Handle]] = {}
        super().__init__()
        self.network = SimulatedNetwork(self)

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], *_: Any, **__: Any
    ) -> SimulatedListener:
        """Listen, as the process that asks."""
        return self.network.listen(_PROCESS.get(), protocol_factory)

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], path: str, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """From the process that asks. Raises: OSError as a socket does."""
        return await self.network.connect(_PROCESS.get(), self.network.find(path.strip("/")), protocol_factory)

    def stop_process(self, pid: int) -> None:
        """Run nothing of it from now on."""
        self._stopped.setdefault(pid, [])

    def continue_process(self, pid: int) -> None:
        """Run what has come due meanwhile, and go on."""
        self._ready.extend(handle for handle in self._stopped.pop(pid, ()) if not handle.cancelled())  # type: ignore[attr-defined]

    def pass_over(self, seconds: float) -> None:
        """The whole machine stands for so long: its clock goes on, and nothing runs."""
        self._instant.now += seconds

    def holds(self, handle: events.Handle) -> bool:
        """Keep a callback back while its process is stopped."""
        held = self._stopped.get(handle._context.get(_PROCESS, 0)) if self._stopped else None  # type: ignore[attr-defined]
        if held is None:
            return False
        held.append(handle)
        return True

    def _call_soon(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> events.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> events.TimerHandle:
        """As of every loop, with a handle that can be kept back."""
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer


Program = Callable[["Life"], Coroutine[Any, Any, int]]
"""What a process runs; returns its exit code."""


class Life:
    """One process from its start to its end."""

    def __init__(
        self,
        host: SimulatedHost,
        name: str,
        program: Program,
        *,
        unit: str = "steps",
        node: str = "",
        within: Life | None = None,
        environment: Mapping[str, str] | None = None,
        is_outside: bool = False,
    ) -> None:
        self.host = host
        self.name = name
        self.is_outside = is_outside
        """No process of the run: it does not beat, and outlives every supervisor."""
        self.node = node
        """Where it runs; empty for the machine of the supervisor."""
        self.within = within
        """The process of a node that has started it, and that it ends with."""
        self.environment = dict(environment or {})
        self.is_cut_off = False
        """Its node is lost: nobody hears of its end."""
        self.pid = host.next_pid()
        self.heart = Heartbeat(name=name, unit=unit, clock=host.now)
        self.code: int | None = None
        self.said = ""
        self.is_frozen = self.is_blocked = False
        self.is_open = False
        """A server that has said that it can answer."""
        self.started_at = host.now()
        self.on_end: list[Callable[[], object]] = []
        self._asked: dict[asyncio.Task[Any], asyncio.Future[Any]] = {}
        self._context = contextvars.copy_context()
        self._context.run(_PROCESS.set, self.pid)
        self._context.run(HEART.set, self.heart)
        host.lives[self.pid] = self
        if within is not None:
            within.on_end.append(lambda: self.end(-signal.SIGKILL))
        self._main = self.spawn(program(self))
        self._main.add_done_callback(self._returned, context=contextvars.Context())

    @property
    def is_alive(self) -> bool:
        return self.code is None

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Have something run in this process."""
        return self.host.loop.create_task(work, context=self._context.copy())

    async def ask(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """What this process answers to somebody else.

        Raises: ProviderError when it is gone, ends meanwhile or takes too long.
        """
        if not self.is_alive:
            work.close()
            raise ProviderError(f"connection refused: {self.name} is gone")
        answer: asyncio.Future[T] = self.host.loop.create_future()
        task = self.spawn(work)
        self._asked[task] = answer
        task.add_done_callback(lambda done: _pass_on(done, answer), context=contextvars.Context())
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise ProviderError(f"{self.name} did not answer within {timeout_s:.0f} s") from error
        finally:
            self._asked.pop(task, None)
            task.cancel()

    def freeze(self) -> None:
        """As SIGSTOP does."""
        if self.is_alive:
            self.is_frozen = True
            self.host.loop.stop_process(self.pid)

    def block(self) -> None:
        """Its main loop stands; its other threads run."""
        if self.is_alive:
            self.is_blocked = True
            self.host.loop.stop_process(self.pid)

    def go_on(self) -> None:
        """After `freeze` or `block`."""
        self.is_frozen = self.is_blocked = False
        self.host.loop.continue_process(self.pid)

    def end(self, code: int) -> None:
        """It is gone from now on."""
        if not self.is_alive:
            return
        self.code = code
        self.go_on()
        self.host.loop.network.end(self.pid, is_silent=self.is_cut_off)
        for task, answer in list(self._asked.items()):
            if not answer.done():
                answer.set_exception(ProviderError(f"connection reset: {self.name} is gone"))
                answer.exception()  # whoever asked may be gone as well
            task.cancel()
        self._main.cancel()
        for tell in self.on_end:
            tell()

    def beat(self) -> Beat | None:
        """What it says of itself now; None of one that says nothing."""
        if self.is_frozen or not self.is_alive:
            return None
        return dataclasses.replace(self.heart.measure(), pid=self.pid, where="")

    def _returned(self, main: asyncio.Task[int]) -> None:
        if main.cancelled():
            self.end(-signal.SIGKILL)
        elif (error := main.exception()) is None:
            self.end(main.result())
        elif isinstance(error, Killed):
            self.end(-signal.SIGKILL)
        else:
            self.said = f"{type(error).__name__}: {error}"
            self.host.errors.append(error)
            self.end(1)


def _pass_on(done: asyncio.Task[Any], answer: asyncio.Future[Any]) -> None:
    if done.cancelled():
        if not answer.done():
            answer.cancel()
        return
    error = done.exception()
    if answer.done():
        return
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(error)


class SimulatedHost:
    """The machine of a run at `run_dir`: keeps `HostMachine`, and beats for whoever runs on it."""

    def __init__(self, run_dir: RunDir, loop: HostLoop) -> None:
        self.run_dir = run_dir
        self.loop = loop
        self.lives: dict[int, Life] = {}
        self.errors: list[BaseException] = []
        """What programs died of that is no fault of the history's."""
        self.is_disk_full = False
        self.jumped_s = 0.0
        self.supervisor_pid = 0
        self._next_pid = FIRST_PID

    # The machine, as a supervisor asks it

    @property
    def pid(self) -> int:
        return self.supervisor_pid

    def now(self) -> float:
        return self.loop.time()

    def wall(self) -> float:
        return OPENED_S + self.loop.time() + self.jumped_s

    def sleep(self, seconds: float) -> None:
        """In a call that blocks: time passes, and what comes due meanwhile comes late."""
        self.loop.pass_over(seconds)

    def state_of(self, pid: int) -> str:
        life = self.lives.get(pid)
        return "" if life is None else "T" if life.is_frozen else "S"

    def kill(self, pid: int) -> None:
        if pid in self.lives:
            self.lives[pid].end(-signal.SIGKILL)

    def free_bytes(self, path: Path) -> int:
        return 0 if self.is_disk_full else 2**40

    # What runs on it

    @property
    def current(self) -> Life:
        """The process that asks."""
        return self.lives[_PROCESS.get()]

    def next_pid(self) -> int:
        """A pid that nobody has had."""
        self._next_pid += 1
        return self._next_pid

    def living(self, name: str) -> Life | None:
        """The process of a name, or whose name begins so."""
        alive = [life for life in self.lives.values() if life.is_alive]
        return next((life for life in alive if life.name == name), None) or next(
            (life for life in alive if life.name.startswith(f"{name}-")), None
        )

    def ledger(self, life: Life | None = None) -> Ledger:
        """A connection of a process to the run's ledger, which a full disk or its death closes."""
        ledger = Ledger(self.run_dir.ledger, clock=self.wall if life else self.now)
        write = ledger.database.transaction

        @contextmanager
        def transaction() -> Iterator[Any]:
            if life is not None and not life.is_alive:
                raise Killed
            if self.is_disk_full and (self.run_dir.path / "reserve").exists():
                raise StorageError("no space left while writing run.db")
            with write() as connection:
                yield connection

        ledger.database.transaction = transaction  # type: ignore[method-assign]
        return ledger

    async def beat_for_ever(self) -> None:
        """Write the beats of this machine's processes down, as their threads do."""
        while True:
            for pid, life in list(self.lives.items()):
                if not life.is_alive:
                    del self.lives[pid]
                elif not (life.node or life.is_outside) and (beat := life.beat()) is not None:
                    write_beat(self.run_dir.beats, beat)
            await asyncio.sleep(BEAT_S)


class SimulatedProcess:
    """A `SupervisedProcess` of this machine."""

    host = ""

    def __init__(self, spec: ProcessSpec, machine: SimulatedHost, program: Program, unit: str) -> None:
        self.spec = spec
        self._machine = machine
        self._program = program
        self._unit = unit
        self._ready = ReadyFile(spec.ready_file)
        self._life: Life | None = None

    @property
    def pid(self) -> int | None:
        return None if self._life is None else self._life.pid

    @property
    def started_at(self) -> float:
        return 0.0 if self._life is None else self._life.started_at

    def start(self) -> None:
        """A new life of it."""
        self._ready.prepare()
        self._life = Life(
            self._machine, self.spec.name, self._program, unit=self._unit, environment=self.spec.environment
        )

    def exit_code(self) -> int | None:
        return None if self._life is None else self._life.code

    def endpoint(self) -> dict[str, Any] | None:
        return self._ready.endpoint()

    def remove_ready_file(self) -> None:
        self._ready.remove()

    def is_ready(self) -> bool:
        return self.exit_code() is None and self._ready.is_satisfied

    def signal(self, number: signal.Signals) -> None:
        """One that is stopped hears of SIGKILL alone."""
        if self._life is not None and (number == signal.SIGKILL or not self._life.is_frozen):
            self._life.end(-number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self.exit_code()

    def last_line(self) -> str:
        return "" if self._life is None else self._life.said


class SimulatedLauncher:
    """Starts programs by the name of their module, in place of what a machine would run."""

    def __init__(self, machine: SimulatedHost, programs: Mapping[str, tuple[Program, str]]) -> None:
        self._machine = machine
        self.programs = programs

    def process(self, spec: ProcessSpec) -> SupervisedProcess:
        return SimulatedProcess(spec, self._machine, *self.programs[spec.module])

    def can_start(self, spec: ProcessSpec) -> bool:
        return True

    def pids(self) -> list[int]:
        return []

    def news(self) -> list[HostNews]:
        return []

    def close(self) -> None:
        """Whoever is left is gone with the machine."""


def write_endpoint(path: Path | None, pid: int) -> None:
    """A server says that it can answer."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"base_url": f"http://simulated:{pid}/v1", "pid": pid}))


async def until(is_over: Callable[[], bool], look_s: float = 0.1) -> None:
    """Wait for something that nobody tells of."""
    while not is_over():  # noqa: ASYNC110 - a state of the machine, which has no event
        await asyncio.sleep(look_s)


async def ended(work: Awaitable[Any]) -> None:
    """Wait for the end of something that was cancelled, however it goes."""
    with suppress(asyncio.CancelledError, Killed, Exception):
        await work
