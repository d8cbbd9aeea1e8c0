"""The supervisor of a run: starts its processes, restarts what dies or stands still, ends what is done.

Where they run is its launcher's matter: on this machine, or on the nodes of a cluster.

One loop, driven by the caller (`for _ in supervisor.ticks()`), so that a terminal can show progress between ticks. A
process that crashes is started again after a growing pause, `max_restarts` times within `RESTART_WINDOW_S`; exit code
2 or 3 is the process's own word that starting again is useless, and three crashes in a row right after the start say
the same. Invariants: when `ticks` ends, no process of the run is left; the loop waits for no database and no disk.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

from mettle.errors import StorageError
from mettle.processes.beats import BEATS_FOLDER, Beat, Heartbeat, read_beats
from mettle.processes.child import explain_exit
from mettle.processes.liveness import TOLD_S, is_worker
from mettle.processes.managed import ProcessSpec
from mettle.runs.costs import LifeCosts
from mettle.runs.host import HostWatch
from mettle.runs.launcher import Launcher, LocalLauncher, SupervisedProcess
from mettle.runs.machine import HostMachine, ThisMachine
from mettle.runs.outside import BANNED, JOINED, LEFT, OutsideWatch
from mettle.runs.recorder import JournalThread
from mettle.runs.watchdog import Report, Watchdog
from mettle.storage.database import BUSY_TIMEOUT_S
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

logger = logging.getLogger(__name__)

TICK_S = 0.1
CHECK_S = 1.0
STOP_GRACE_S = 20.0
FINAL_CODES = frozenset({2, 3})
QUICK_CRASH_S = 15.0
MAX_QUICK_CRASHES = 3
RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0)
RESTART_WINDOW_S = 1800.0
"""Restarts longer ago than this do not count against `max_restarts`."""
RESERVE_BYTES = 512 * 2**10
"""Set aside on the run's disk, so that a run that fills it can still say so."""
NOTED = frozenset({"restart", "stall", "recovery", "recovered", "disk_low", "clock_jump", "gap", "place"}) | {
    JOINED,
    LEFT,
    BANNED,
}
"""Events that a person at the terminal is told of."""


@dataclass(slots=True)
class Slot:
    """A process and its history in this run."""

    process: SupervisedProcess
    restarts: int = 0
    recent: deque[float] = field(default_factory=deque)
    quick_crashes: int = 0
    start_at: float = 0.0
    state: str = "waiting"


class Supervisor:
    """Runs `specs` until the one named `main` ends well, one of them cannot go on, or `stop` is called."""

    def __init__(
        self,
        run_dir: RunDir,
        ledger: Ledger,
        specs: Sequence[ProcessSpec],
        *,
        main: str,
        max_restarts: int = 8,
        life: int = 1,
        launcher: Launcher | None = None,
        machine: HostMachine | None = None,
        recorder: Callable[[Callable[[], None]], JournalThread] = JournalThread,
        heart: Heartbeat | None = None,
    ) -> None:
        self._machine = machine = machine or ThisMachine()
        self._run_dir = run_dir
        self._ledger = ledger
        self._main = main
        self._max_restarts = max_restarts
        # What the run went through before this supervisor counts as well.
        restarts = {row.name: row.restarts for row in ledger.journal.processes()}
        self._launcher = launcher or LocalLauncher(run_dir.logs)
        self._slots = {spec.name: Slot(self._launcher.process(_beating(spec, run_dir))) for spec in specs}
        for name, slot in self._slots.items():
            slot.restarts = restarts.get(name, 0)
        self._watchdog = Watchdog()
        self._host = HostWatch(run_dir.path, machine)
        self._workers = OutsideWatch(run_dir.outside)
        self._heart = heart or Heartbeat(run_dir.beats / "supervisor.beat", unit="ticks")
        self._recorder = recorder(self._tell_of_itself)
        self._last_tick = float("inf")
        self._is_told_of_itself = False
        self._is_stopping = False
        self.costs = LifeCosts(life)
        self.notes: list[str] = []
        self.failure: str | None = None
        self.failure_code = 1

    def process(self, name: str) -> SupervisedProcess:
        """One of the run's processes."""
        return self._slots[name].process

    def stop(self) -> None:
        """Ask the loop to end the run cleanly."""
        self._is_stopping = True

    def fail(self, message: str, code: int) -> None:
        """End the run for a reason that is outside of its processes."""
        if self.failure is None:
            self.failure, self.failure_code = message, code
            self.event("failed", message)

    def ticks(self) -> Iterator[None]:
        """Start everything and yield several times a second until the run has ended; then nothing is left running."""
        next_check = 0.0
        self._clear()
        self._heart.figures = self.costs.figures
        self._recorder.start()
        with self._heart:
            try:
                while not self._is_over():
                    now = self._last_tick = self._machine.now()
                    self._heart.tick()
                    for name, slot in self._slots.items():
                        self._attend(name, slot, now)
                    if now >= next_check:
                        next_check = now + CHECK_S
                        self._check()
                    yield
                    self._machine.sleep(TICK_S)
            finally:
                self._last_tick = float("inf")
                self._heart.rest()
                self._end_all()

    def _clear(self) -> None:
        """No process of the run lives yet: what says that one does was left behind."""
        for path in [*self._run_dir.beats.glob("*.beat"), *self._run_dir.endpoint("x").parent.glob("*.json")]:
            path.unlink(missing_ok=True)
        with suppress(OSError):
            (self._run_dir.path / "reserve").write_bytes(os.urandom(RESERVE_BYTES))

    def _is_over(self) -> bool:
        if self._recorder.error is not None and self.failure is None:
            self.failure, self.failure_code = str(self._recorder.error), StorageError.exit_code
            self.event("failed", self.failure)
        return self._is_stopping or self.failure is not None or self._slots[self._main].state == "done"

    def _attend(self, name: str, slot: Slot, now: float) -> None:
        if slot.state in ("waiting", "restarting"):
            spec = slot.process.spec
            is_due = now >= slot.start_at and all(self._is_satisfied(other) for other in spec.after)
            if is_due and self._launcher.can_start(spec):
                self._start(name, slot)
            return
        if slot.state == "done":
            return
        code = slot.process.exit_code()
        if code is not None:
            self._ended(name, slot, code, now)
        elif slot.state == "starting" and slot.process.is_ready():
            self._set_state(name, slot, "running")
        elif slot.state == "starting" and now - slot.process.started_at > slot.process.spec.ready_timeout_s:
            self.event("not_ready", f"{name} is not ready after {slot.process.spec.ready_timeout_s:.0f} s: ended")
            slot.process.signal(signal.SIGKILL)

    def _is_satisfied(self, name: str) -> bool:
        slot = self._slots[name]
        return slot.state == ("done" if slot.process.spec.ready_file is None else "running")

    def _start(self, name: str, slot: Slot) -> None:
        slot.process.start()
        self._set_state(name, slot, "starting")
        if slot.process.spec.ready_file is None:
            self._set_state(name, slot, "running")

    def _ended(self, name: str, slot: Slot, code: int, now: float) -> None:
        slot.process.remove_ready_file()
        (self._run_dir.beats / f"{name}.beat").unlink(missing_ok=True)
        if not slot.process.host:
            self.costs.ended(slot.process.pid or 0, is_killed=code < 0)
        if code == 0 and not slot.process.spec.is_service:
            self._set_state(name, slot, "done", code)
            return
        sentence = explain_exit(name, code, slot.process.last_line() if code > 0 else "")
        is_quick = code > 0 and now - slot.process.started_at < QUICK_CRASH_S
        slot.quick_crashes = slot.quick_crashes + 1 if is_quick else 0
        while slot.recent and now - slot.recent[0] > RESTART_WINDOW_S:
            slot.recent.popleft()
        if code in FINAL_CODES or len(slot.recent) >= self._max_restarts or slot.quick_crashes >= MAX_QUICK_CRASHES:
            self.failure = (
                slot.process.last_line() if code in FINAL_CODES else f"{sentence}; {len(slot.recent)} restarts"
            )
            self.failure_code = code
            self._set_state(name, slot, "failed", code)
            self.event("failed", sentence)
            return
        if code > 0 and self._host.is_disk_low:  # not every library says that it was the disk
            path = self._run_dir.path
            self.failure = f"{sentence}; {path} has nearly no space left: free some space and resume the run"
            self.failure_code = StorageError.exit_code
            self._set_state(name, slot, "failed", code)
            self.event("failed", self.failure)
            return
        pause = RESTART_PAUSES_S[min(len(slot.recent), len(RESTART_PAUSES_S) - 1)]
        slot.restarts += 1
        slot.recent.append(now)
        slot.start_at = now + pause
        self._set_state(name, slot, "restarting", code)
        self.event("restart", f"{sentence}; restarting in {pause:g} s", process=name, code=code)

    def _check(self) -> None:
        beats = self._living_beats()
        machine = self._machine
        others = {name: beat for name, beat in beats.items() if beat.pid != machine.pid}  # of itself its thread tells
        for report in self._watchdog.check(others, machine.now(), state_of=machine.state_of, age_of=self._age_of):
            fault = report.fault
            self.event(report.kind, report.text, process=fault.process, cause=fault.kind, age_s=round(fault.age_s, 1))
            if report.kind == "recovery":
                self._end_stalled(report, beats.get(fault.process))
        here = [s.process for s in self._slots.values() if s.process.exit_code() is None and not s.process.host]
        pids = [*(process.pid for process in here if process.pid is not None), *self._launcher.pids()]
        self.costs.measure(pids, [beat for beat in beats.values() if not beat.host])
        for news in [*self._host.look(), *self._launcher.news(), *self._workers.look()]:
            self.event(news.kind, news.text, **news.data)

    def _age_of(self, name: str) -> float:
        slot = self._slots.get(name)
        return float("inf") if slot is None else self._machine.now() - slot.process.started_at

    def _living_beats(self) -> dict[str, Beat]:
        """The beats of processes that exist; what a killed one has left is removed."""
        beats = read_beats(self._run_dir.beats)
        for beat in [beat for beat in beats.values() if not (beat.host or self._machine.state_of(beat.pid))]:
            del beats[beat.name]
            (self._run_dir.beats / f"{beat.name}.beat").unlink(missing_ok=True)
        return beats

    def _end_stalled(self, report: Report, beat: Beat | None) -> None:
        name, pid = report.fault.process, report.fault.pid
        slot = self._slots.get(name) or self._slots.get(name.partition("-")[0])  # trainer-1 is a rank of the trainer
        if slot is not None and slot.process.exit_code() is None:
            slot.process.signal(signal.SIGKILL)
        is_here = (is_worker(name) if slot is None else not slot.process.host) and not (beat and beat.host)
        if is_here and pid and self._machine.state_of(pid):  # in a session of its own
            self._machine.kill(pid)

    def _tell_of_itself(self) -> None:
        """In the recorder's thread: the supervisor's own loop stands (a terminal that takes no more output)."""
        late_s = self._machine.now() - self._last_tick
        if late_s < TOLD_S:
            self._is_told_of_itself = False
        elif not self._is_told_of_itself:
            self._is_told_of_itself = True
            where = self._heart.measure().where
            text = f"supervisor (pid {self._machine.pid}): its loop is blocked for {late_s:.0f} s in {where}"
            self._ledger.journal.event("supervisor", "stall", text, process="supervisor", cause="blocked")
            print(f"note: {text}", file=sys.stderr, flush=True)

    def _end_all(self) -> None:
        if self._slots[self._main].state != "done":
            state = "stopping" if self.failure is None else "failed"
            self.record(lambda: self._ledger.journal.set_fact("state", state))
        running = [slot for slot in self._slots.values() if slot.process.exit_code() is None and slot.process.pid]
        for slot in running:
            slot.process.signal(signal.SIGTERM)
        deadline = self._machine.now() + STOP_GRACE_S
        for slot in running:
            if slot.process.wait(max(0.1, deadline - self._machine.now())) is None:
                slot.process.signal(signal.SIGKILL)
                slot.process.wait(5.0)
        for name, slot in self._slots.items():
            slot.process.remove_ready_file()
            if slot.state not in ("done", "failed"):
                self._set_state(name, slot, "stopped", slot.process.exit_code())
        self._launcher.close()
        self._living_beats()
        self._free_reserve()
        self._recorder.close(BUSY_TIMEOUT_S)
        self._is_over()  # a word that could not be written is a failure of the run

    def _free_reserve(self) -> None:
        """Let the last words be written where the disk is full: when no process is left that would take the room."""
        (self._run_dir.path / "reserve").unlink(missing_ok=True)
        self._recorder.again()

    def record(self, write: Callable[[], None]) -> None:
        """Have something written to the ledger, without a wait for that."""
        self._recorder.put(write)

    def _set_state(self, name: str, slot: Slot, state: str, code: int | None = None) -> None:
        slot.state = state
        pid, restarts = slot.process.pid, slot.restarts
        self.record(
            lambda: self._ledger.journal.record_process(name, state, pid=pid, restarts=restarts, exit_code=code)
        )
        logger.info("%s is %s", name, state, extra={"pid": pid, "exit_code": code})

    def event(self, kind: str, message: str, **data: object) -> None:
        """Say in the log and in the run's events what has happened."""
        logger.warning(message, extra={"kind": kind})
        if kind in NOTED:
            self.notes.append(message)
        self.record(lambda: self._ledger.journal.event("supervisor", kind, message, **data))


def _beating(spec: ProcessSpec, run_dir: RunDir) -> ProcessSpec:
    return dataclasses.replace(spec, environment={**spec.environment, BEATS_FOLDER: str(run_dir.beats)})


class StopSignals:
    """Within the block, Ctrl-C and SIGTERM call `on_stop` once; a second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self.is_interrupted = False

    def __enter__(self) -> StopSignals:
        self._previous = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt
        self.is_interrupted = True
        self._on_stop()
